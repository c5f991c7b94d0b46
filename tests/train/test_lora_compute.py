import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqquant as eqq
from eqquant.train import LoRA, LowPrecision, Stochastic, tree_compute

from ..helpers import normal
from ..sharding.meshes import mesh, put


class Net(eqx.Module):
    layers: eqx.nn.Linear  # a stack

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        step = lambda x, a: (jnp.tanh(eqx.combine(a, static)(x)), None)
        return lax.scan(jax.checkpoint(step), x, arrays)[0]


make = eqx.filter_vmap(lambda key: eqx.nn.Linear(48, 48, key=key))
net = Net(make(jr.split(jr.key(0), 3)))
x, target = normal(16, 48), normal(16, 48, seed=7)
integers = dict(backward=Stochastic("int8"))


def adapters_last(model, dora):
    model = tree_compute(model, **integers)
    return eqq.train.lora(model, rank=4, dora=dora, key=jr.key(1))[0]


def adapters_first(model, dora):
    model = eqq.train.lora(model, rank=4, dora=dora, key=jr.key(1))[0]
    return tree_compute(model, **integers)


# Adapters of weights that compute in fewer bits, in a loop that accumulates gradients,
# donates buffers, shards the data, and computes layers of a scan again.
@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "dora", [False, pytest.param(True, marks=pytest.mark.thorough)]
)
def test_training(dora):
    m = mesh("auto", 8)
    optimizer = optax.MultiSteps(optax.adam(1e-2), 2)

    @eqx.filter_jit(donate="all-except-first")
    def step(frozen, adapters, state, x, target):
        def loss(adapters):
            model = eqx.combine(adapters, frozen)
            return jnp.mean((jax.vmap(model)(x) - target) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(adapters)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, adapters)
        return eqx.apply_updates(adapters, updates), state, value

    def train(model):
        spec = eqq.train.lora_spec(model)
        adapters, frozen = eqx.partition(model, spec)
        state, values = optimizer.init(adapters), []
        for _ in range(8):
            data = put(x, m, "a"), put(target, m, "a")
            adapters, state, value = step(frozen, adapters, state, *data)
            values.append(float(value))
        return eqx.combine(adapters, frozen), np.array(values)

    model = adapters_first(net, dora)
    weight = model.layers.weight
    assert isinstance(weight, LoRA) and isinstance(weight.base, LowPrecision)
    assert model == adapters_last(net, dora)
    plain = tree_compute(model, forward=None)
    assert plain.layers.weight.base is net.layers.weight
    before = np.asarray(net.layers.weight)
    new, values = train(model)
    _, wanted = train(eqq.train.lora(net, rank=4, dora=dora, key=jr.key(1))[0])
    assert not np.array_equal(values, wanted)
    np.testing.assert_allclose(values, wanted, rtol=0.02)
    assert values[-1] < values[0]
    np.testing.assert_array_equal(new.layers.weight.base.weight, before)
    merged = eqq.train.merge_lora(new)
    saved = eqq.train.lora_only(new)
    again, _ = eqq.train.with_lora(tree_compute(net, **integers), saved)
    for a, b in zip(*map(jtu.tree_leaves, (again, new)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    dense = new.layers.weight.dequantize()
    np.testing.assert_allclose(merged.layers.weight, dense, rtol=1e-6, atol=1e-6)
    placed = new.layers.weight.with_sharding(
        jax.sharding.NamedSharding(m, P(None, "a", None))
    )
    assert placed.base.weight.sharding.spec == P(None, "a", None)


# Quantized bases multiply their own way.
def test_quantized_bases_are_left_alone():
    model = {"w": eqq.quantize(jnp.asarray(normal(40, 48)), "int8", axis=-1)}
    model, _ = eqq.train.lora(model, rank=4, min_size=0, key=jr.key(0))
    assert tree_compute(model, min_size=0) == model
