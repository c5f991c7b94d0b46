import equinox as eqx
import jax
import jax.random as jr
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from .costs import language_model, memory_above_the_call


@pytest.mark.thorough
@pytest.mark.optimized
def test_memory_of_calibration():
    assert memory_above_the_call(*language_model()) <= 1


# Without a copy of any input in another order.
@pytest.mark.optimized
def test_memory_on_a_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    place = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, P(*spec)))
    arrays, static = eqx.partition(
        eqx.nn.MLP(64, 64, 128, 1, key=jr.key(0)), eqx.is_array
    )
    x = place(jr.normal(jr.key(1), (64, 64, 64)), "data")
    fn = lambda model, x: jax.vmap(jax.vmap(model))(x)
    assert memory_above_the_call(fn, eqx.combine(place(arrays), static), x) <= 1
