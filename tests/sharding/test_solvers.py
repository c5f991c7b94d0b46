import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq


# A weight whose rows are split over some devices, and its blocks over others.
@pytest.mark.examples(1)
@pytest.mark.parametrize("type", (AxisType.Explicit, AxisType.Auto))
@pytest.mark.parametrize("method", (eqq.GPTQ(), eqq.ScaleSearch()))
def test_methods(method, type):
    model = eqx.nn.Linear(128, 64, key=jr.key(0))
    x = jr.normal(jr.key(1), (256, 128)) @ jr.normal(jr.key(2), (128, 128))
    stats = eqq.calibrate(lambda model, x: jax.vmap(model)(x), model, [x])
    solved = lambda model: eqq.tree_quantize(
        model, eqq.Int4(64), min_size=0, stats=stats, method=method
    )
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(type,) * 2)
    place = NamedSharding(mesh, P("data", "model"))
    split = eqx.tree_at(lambda m: m.weight, model, jax.device_put(model.weight, place))
    found, wanted = solved(split).weight, solved(model).weight
    assert found.sharding == place
    assert found.stored["codes"].addressable_shards[0].data.size * 8 == 64 * 64
    w = np.asarray(wanted.dequantize())
    np.testing.assert_allclose(found.dequantize(), w, atol=1e-5)
    nearest = eqq.quantize(model.weight, eqq.Int4(64), axis=-1).dequantize()
    assert np.mean(np.abs(w - nearest) > 1e-4) > 0.1


# A weight that a compiled function closes over.
@pytest.mark.parametrize("type", (AxisType.Explicit, AxisType.Auto))
def test_in_a_compiled_function(type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(type,))
    w = jr.normal(jr.key(0), (64, 32))
    split = jax.device_put(w, NamedSharding(mesh, P("data")))
    method = eqq.ScaleSearch()
    solve = lambda w: eqq.tree_quantize([w], "int4", min_size=0, method=method)[0]
    found = jax.jit(lambda: solve(split).dequantize())()
    np.testing.assert_allclose(found, solve(w).dequantize(), atol=1e-6)
