import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq

from ..helpers import error, formats, normal, trees_equal


def mesh(kind, *shape):
    names = ("a", "b")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


placements = pytest.mark.parametrize(
    "shape, spec",
    (
        ((8,), P(None, "a")),
        ((8,), P("a")),
        ((4, 2), P("b", "a")),
        ((4, 2), P(None, ("a", "b"))),
    ),
)
# With numbers of rows of which eighth parts are whole blocks, and whole bytes.
sharded_formats = pytest.mark.parametrize(
    "name, k", (("nf4", 512), ("ternary-48", 1920), ("nested", 4096))
)


@pytest.mark.examples(2)
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@placements
@sharded_formats
def test_placement(name, k, kind, shape, spec):
    q = eqq.quantize(normal(k, 16), formats[name])
    sharding = NamedSharding(mesh(kind, *shape), spec)
    sharded = q.with_sharding(sharding)
    assert sharded.is_sharded and not q.is_sharded
    assert sharded.placement.is_equivalent_to(sharding, 2)
    assert sharded.T.placement.is_equivalent_to(
        NamedSharding(sharding.mesh, P(*reversed((*spec, None)[:2]))), 2
    )
    assert trees_equal(jax.device_get(sharded.stored), jax.device_get(q.stored))
    codes = max(jtu.tree_leaves(sharded), key=lambda a: a.size)
    assert all(8 * shard.data.size == codes.size for shard in codes.addressable_shards)


@pytest.mark.examples(2)
@placements
def test_sharded(shape, spec):
    k = 512
    q = eqq.quantize(normal(k, 16))
    sharded = q.with_sharding(NamedSharding(mesh(AxisType.Auto, *shape), spec))
    x = normal(4, k)

    @jax.jit
    def everything(x, q):
        y, vjp = jax.vjp(lambda x: x @ q, x)
        return y, vjp(y), q.T @ x.T, q.dequantize(), jax.vmap(lambda x: x @ q)(x)

    y, (gradient,), left, dense, mapped = everything(x, sharded)
    w = q.dequantize()
    assert error(y, x, w) < 1e-6
    assert error(mapped, x, w) < 1e-6
    assert error(left, w.T, x.T) < 1e-6
    assert error(gradient, y, w.T) < 1e-6
    np.testing.assert_array_equal(dense, w)


# What is declared is of the last axes, so it is true of what is stacked and indexed.
def test_sharded_stack():
    d = mesh(AxisType.Auto, 8)
    stack = eqq.quantize(normal(3, 64, 16))
    stack = stack.with_sharding(NamedSharding(d, P(None, None, "a")))
    matrix = stack[0]
    expected = NamedSharding(d, P(None, "a"))
    assert matrix.placement.is_equivalent_to(expected, 2)
    assert matrix.sharding.is_equivalent_to(expected, 2)
    assert trees_equal(matrix.with_sharding(matrix.sharding), matrix)
    again = jtu.tree_map(lambda *leaves: jnp.stack(leaves), matrix, matrix)
    expected = NamedSharding(d, P(None, None, "a"))
    assert again.placement.is_equivalent_to(expected, 3)


# A declared sharding is that of the last axes, however many were stacked in front.
def test_transposed_stack_of_vectors():
    q = eqq.quantize(normal(128), "int8").with_sharding(P("a"))
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), q)
    assert stack.mT.sharding == P("a", None)
    np.testing.assert_array_equal(stack.mT.dequantize(), stack.dequantize().T)
