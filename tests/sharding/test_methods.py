"""Weights on a mesh are rounded as they are on one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqquant as eqq

from .meshes import kinds, mesh, put


fn = lambda model, x: jax.vmap(model)(x)
model = eqx.nn.MLP(32, 32, 32, depth=1, key=jr.key(0))
x = jr.normal(jr.key(1), (128, 32))

hows = {
    "GPTQ": lambda model, x: dict(stats=eqq.calibrate(fn, model, [x])),
    "ScaleSearch": lambda model, x: dict(method=eqq.ScaleSearch()),
    "AWQ": lambda model, x: dict(
        stats=eqq.calibrate(fn, model, [x]), method=eqq.AWQ(tries=3)
    ),
    "Sequential": lambda model, x: dict(stats=eqq.Sequential(fn, [x])),
}


@pytest.mark.examples(1)
@pytest.mark.parametrize("how", hows)
@pytest.mark.parametrize("kind", kinds)
def test_on_a_mesh(kind, how):
    devices = mesh(kind, 2, 4)
    rules = eqq.Rules([("*.weight", P("b")), ("*", P())])
    with jax.set_mesh(devices):
        sharded = eqq.tree_shard(model, rules, devices)
        xs = put(x, devices, "a")
        q = eqq.tree_quantize(sharded, "int4", min_size=0, **hows[how](sharded, xs))
        y = fn(q, xs)
        assert q.layers[0].weight.sharding == sharded.layers[0].weight.sharding
    alone = eqq.tree_quantize(model, "int4", min_size=0, **hows[how](model, x))
    for a, b in zip(q.layers, alone.layers, strict=True):
        a, b = (np.asarray(layer.weight.dequantize()) for layer in (a, b))
        # (Sums in another order may round a number to the next point.)
        assert np.mean(np.abs(a - b) > 1e-5) < 0.01
    np.testing.assert_allclose(y, fn(alone, x), atol=0.05)


@pytest.mark.examples(1)
@pytest.mark.parametrize("kind", kinds)
def test_layers_of_a_scan(kind):
    w = model.layers[0].weight
    stack = jnp.stack([w, w + 0.01])
    layer = lambda x, w: (jnp.tanh(x @ w) + x, None)
    call = lambda stack, x: jax.lax.scan(layer, x, stack["w"])[0]
    one = lambda stack, x: eqq.tree_quantize(
        {"w": stack}, "int4", min_size=0, stats=eqq.Sequential(call, [x]), axis=-2
    )["w"]
    devices = mesh(kind, 2, 4)
    with jax.set_mesh(devices):
        q = one(put(stack, devices), put(x, devices, "a"))
    a, b = (np.asarray(each.dequantize()) for each in (q, one(stack, x)))
    assert np.mean(np.abs(a - b) > 1e-5) < 0.01


def test_weights_in_a_shard_map():
    devices = mesh("auto", 8)

    def call(model, x):
        arrays, static = eqx.partition(model, eqx.is_array)
        apply = lambda arrays, x: fn(eqx.combine(arrays, static), x)
        specs = P(), P("a")
        return jax.shard_map(apply, mesh=devices, in_specs=specs, out_specs=P("a"))(
            arrays, x
        )

    found, wanted = (eqq.calibrate(f, model, [x]) for f in (call, fn))
    for path in wanted:
        np.testing.assert_allclose(found[path].value, wanted[path].value, atol=1e-3)
    with pytest.raises(ValueError, match="`shard_map`, which `Sequential` does not"):
        eqq.tree_quantize(model, "int4", min_size=0, stats=eqq.Sequential(call, [x]))
