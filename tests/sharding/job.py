import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq

from ..helpers import normal


# What any number of processes do together, on eight devices.


def make_mesh():
    """The devices of each process are along "data", those of others along "model"."""
    return Mesh(np.array(jax.devices()).reshape(2, 4).T, ("data", "model"))


def put(x, mesh, spec):
    """An array that each process has becomes one of all."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda i: np.asarray(x)[i])


specs = [P("model", "data"), P(None, "model")]


def make_dense(mesh):
    """A model of which no process has a weight as a whole."""
    mlp = eqx.filter_eval_shape(lambda: eqx.nn.MLP(64, 64, 64, 1, key=jr.key(0)))
    where = lambda mlp: [x for layer in mlp.layers for x in (layer.weight, layer.bias)]
    placed = [
        put(
            normal(*x.shape, seed=seed) / 8,
            mesh,
            specs[seed // 2] if x.ndim > 1 else P(),
        )
        for seed, x in enumerate(where(mlp))
    ]
    return eqx.tree_at(where, mlp, placed)


def make_quantized(mesh):
    rules = eqq.Rules([("layers.1.*", "int8"), ("*", eqq.NF4(16))])
    return eqq.tree_quantize(make_dense(mesh), rules)


def make_adapted(mesh):
    """The model with adapters, and which of its leaves these are."""
    return eqq.train.lora(make_quantized(mesh), rank=2, key=jr.key(1))


@eqx.filter_jit
def step(adapters, frozen, x, y):
    """The loss, and the adapters after a step."""

    @eqx.filter_value_and_grad
    def loss(adapters):
        prediction = jax.vmap(eqx.combine(adapters, frozen))(x)
        return jnp.mean(jnp.square(prediction - y))

    value, gradient = loss(adapters)
    optimizer = optax.sgd(10.0)
    updates, _ = optimizer.update(gradient, optimizer.init(adapters))
    return value, eqx.apply_updates(adapters, updates)


def train(model, spec, mesh):
    x, y = (put(normal(16, 64, seed=seed), mesh, P("data")) for seed in (4, 5))
    adapters, frozen = eqx.partition(model, spec)
    value, adapters = step(adapters, frozen, x, y)
    return float(value), eqx.combine(adapters, frozen)


def assert_same(a, b, tolerance):
    """The adapters of two models are the same up to rounding, and all else exactly. Of
    arrays of several processes, this looks at the parts that are here."""
    paths, _ = jtu.tree_flatten_with_path(eqx.filter(a, eqx.is_array))
    others = jtu.tree_leaves(eqx.filter(b, eqx.is_array))
    for (path, x), y in zip(paths, others, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        is_adapter = jtu.keystr(path[-1:]) in (".a", ".b")
        for left, right in zip(x.addressable_shards, y.addressable_shards, strict=True):
            assert left.index == right.index
            left, right = np.asarray(left.data), np.asarray(right.data)
            atol = tolerance if is_adapter else 0
            np.testing.assert_allclose(left, right, rtol=0, atol=atol)
