"""Rows in panels are not misread: what takes parts of stored arrays, or joins them,
gives what it would of rows side by side, or is an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant.kernels import supporting

from ..helpers import each, error, formats, normal
from ..panels import in_panels, misread


names = [name for name, format in formats.items() if format.row_axis == -1]


def of_two_blocks(name, *lead, n):
    k = 2 * max(32, formats[name].block_size or 32)
    return eqq.quantize(normal(*lead, k, n), formats[name])


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", each(names))
def test_parts(name):
    q = of_two_blocks(name, n=256)
    p = in_panels(q)
    np.testing.assert_array_equal(p.dequantize(), q.dequantize())
    assert [*misread(q, p)] == []


# The matrix is so large that the reference decodes part after part of it.
@pytest.mark.examples(2)
@pytest.mark.parametrize("name", each(names))
def test_every_kernel(name):
    q = of_two_blocks(name, n=1024)
    p = in_panels(q)
    for a, b in ((p, q), (p.mT, q.mT)):
        x = normal(2, a.shape[0])
        w = np.asarray(b.dequantize(), np.float64)
        problem = eqq.explain(x, a).problem
        assert problem is not None
        for kernel in supporting(problem):
            y = eqq.qmatmul(x, a, kernel=kernel.name)
            near = kernel.short_bound(problem)
            assert error(y, np.asarray(x, np.float64), w) < near, kernel.name


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("nf4", "q4_k", "nested"))
@pytest.mark.parametrize("lead", ((2,), ()))
def test_shards(name, lead):
    q = of_two_blocks(name, *lead, n=128)
    assert [*misread(q, in_panels(q), sharded=True)] == []


def test_an_error_says_what_would_do():
    p = in_panels(eqq.quantize(normal(64, 256), "nf4"))
    part = jax.tree.map(lambda a: a[:4096], p)
    for fn in (
        lambda q: q.dequantize(),
        lambda q: normal(2, 64) @ q,
        lambda q: q.shape,
        lambda q: q[0],
    ):
        with pytest.raises(ValueError, match="prepack"):
            fn(part)


# What is split over devices stays as it is, whether that was declared or not.
def test_what_is_placed_is_not_laid_in_panels():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    q = eqq.quantize(normal(64, 256), "nf4")
    placed = jax.device_put(q, NamedSharding(mesh, P(None, "a")))
    assert eqq.tree_prepack(placed) is placed
    p = in_panels(q)
    whole = jax.device_put(p, NamedSharding(mesh, P()))
    rows = jax.device_put(p, NamedSharding(mesh, P("a")))
    x = normal(3, 64)
    for w in (whole, rows):
        product = jax.jit(lambda x, w: x @ w)
        np.testing.assert_allclose(product(x, w), x @ q, rtol=1e-4, atol=1e-4)
    assert not whole.is_sharded and rows.placement.spec == P(None, "a")


def test_stacks_are_split_over_devices():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    q = eqq.quantize(normal(2, 64, 128), "int8")
    x = normal(2, 3, 64)
    fn = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P("a")
    )
    y = jax.jit(fn)(x, in_panels(q))
    np.testing.assert_allclose(y, x @ q, rtol=1e-4, atol=1e-4)
    assert jnp.shape(y) == (2, 3, 128)


# A byte cannot count 256 rows.
def test_rows_of_ids_in_bytes():
    q = eqq.quantize(normal(256, 64), "int8", axis=-1)
    p = in_panels(q)
    for ids in (np.array([200, 255, 3], np.uint8), np.uint8(200), np.array([-3, 999])):
        np.testing.assert_array_equal(p[ids], q.dequantize()[ids])


# A split that does not end with panels is neither of rows nor of columns.
def test_placement_of_cut_panels():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    p = in_panels(eqq.quantize(normal(64, 128), "int8"))
    cut = jax.device_put(p, NamedSharding(mesh, P("a")))
    assert cut.placement is None and cut.is_sharded
    x = normal(3, 64)
    np.testing.assert_allclose(x @ cut, x @ p, rtol=1e-4, atol=1e-4)
