import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant import implicit, qeinsum, qtake

from ..helpers import formats, main_formats, normal
from .same import assert_close, assert_same, assert_same_gradient


# Of twenty rows: fewer, as many, and more.
sizes = ((7, 0, 10), (0, 0, 0), (20, 0, 0), (1, 1, 1), (0, 13, 7))
sizes += ((10, 10, 10), (0, 21, 5), (19, 30, 0), (0, 0, 40), (25, 0, 7))


@pytest.mark.examples(1)
@pytest.mark.parametrize("name, axis", (("nf4", -1), ("ternary-tensor", -2)))
def test_ragged_dot(name, axis):
    q = eqq.quantize(normal(3, 64, 48), formats[name], axis=axis)
    x = normal(20, 64, seed=1)
    groups = jnp.asarray(sizes)
    # With few rows of each expert, and with many.
    assert_same(lax.ragged_dot, x, q, groups[0], packed=True, read=1)
    fn = jax.jit(implicit(lax.ragged_dot))
    for each in groups:
        assert_close(fn(x, q, each), lax.ragged_dot(x, q.dequantize(), each))
    if axis == -1:
        assert_same_gradient(lax.ragged_dot, x, q, groups[0])
        return
    # Rows of each of several, side by side.
    mapped = jax.vmap(implicit(lax.ragged_dot), in_axes=(None, None, 0))
    assert_close(mapped(x, q, groups[:2])[0], fn(x, q, groups[0]))


def test_ragged_dot_of_many_rows():
    q = eqq.quantize(normal(5, 32, 16), "int8")
    x = normal(700, 32, seed=1)
    groups = jnp.asarray((3, 300, 0, 390, 1))
    fn = lambda x, w, g: lax.ragged_dot(x, w, g, preferred_element_type=jnp.float32)
    assert_same(fn, x, q, groups, packed=True)
    assert_same(fn, x, q, jnp.asarray((300, 300, 0, 390, 100)), packed=True)
    narrow = x.astype(jnp.bfloat16), q.astype(jnp.bfloat16)
    y = assert_same(fn, *narrow, groups, tolerance=2e-2)
    assert y.dtype == jnp.float32


# Experts stay on their devices, each of which multiplies rows of its own: no more is
# sent than by XLA of dense ones.
@pytest.mark.examples(1)
@pytest.mark.optimized
@pytest.mark.parametrize("spec", (P("a"), P("a", None, "b"), P(("a", "b"))), ids=str)
def test_experts_over_devices(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharded, whole = NamedSharding(mesh, spec), NamedSharding(mesh, P())
    q = eqq.quantize(normal(8, 64, 128), "nf4").with_sharding(sharded)
    x, groups = jax.device_put((normal(32, 64), jnp.asarray(of_eight)), whole)
    fn = jax.jit(implicit(lax.ragged_dot))
    compiled = fn.lower(x, q, groups).compile()
    gathered = [s for s in compiled.as_text().splitlines() if " all-gather(" in s]
    assert not any(re.search(r"= \(?(u8|u32)\[", s) for s in gathered), gathered
    wanted = lax.ragged_dot(x, q.dequantize(), groups)
    assert_close(compiled(x, q, groups), wanted)
    # One expert as numbers, and what is needed for dense ones.
    dense = jax.jit(lax.ragged_dot).lower(x, q.dequantize(), groups).compile()
    most = dense.memory_analysis().temp_size_in_bytes + 4 * 64 * 128
    assert compiled.memory_analysis().temp_size_in_bytes <= most


of_eight = (4, 4, 0, 8, 2, 6, 3, 5)


# Within `shard_map`, it has the experts and the sizes that are its own.
def test_experts_within_shard_map():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    q = eqq.quantize(normal(8, 64, 128), "nf4")
    x, groups = normal(32, 64), jnp.asarray(of_eight)

    def own(x, q, groups):
        ends = jnp.cumsum(groups)
        i = lax.axis_index("a")
        sizes = jnp.stack([ends[i] - groups[i], groups[i]])
        before = jax.tree.map(lambda a: jnp.concatenate([a, a]), q)
        y = implicit(lax.ragged_dot)(x, before, sizes)
        mine = (jnp.arange(32) >= sizes[0])[:, None]
        return lax.psum(jnp.where(mine, y, 0), "a")

    fn = jax.shard_map(own, mesh=mesh, in_specs=(P(), P("a"), P()), out_specs=P())
    assert_close(jax.jit(fn)(x, q, groups), lax.ragged_dot(x, q.dequantize(), groups))


# Not all the experts at once, neither on the way nor in the backward pass.
@pytest.mark.optimized
def test_temporaries_of_ragged_dot():
    experts = jax.ShapeDtypeStruct((16, 256, 256), jnp.float32)
    q = jax.eval_shape(lambda w: eqq.quantize(w, "nf4"), experts)
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    groups = jax.ShapeDtypeStruct((16,), jnp.int32)

    def loss(x, q, groups):
        return jnp.sum(jnp.sin(implicit(lax.ragged_dot)(x, q, groups)))

    for fn in (loss, jax.value_and_grad(loss)):
        compiled = jax.jit(fn).lower(x, q, groups).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        assert temporary <= 0.3 * 4 * 16 * 256 * 256


def gathered(x, w, ids):
    return jnp.einsum("ti,tio->to", x, w[ids])


# Those that do not exist are NaN.
def taken(w, ids):
    return w[ids], jnp.take(w, jnp.abs(2 * ids), axis=0)


@pytest.mark.examples(2)
@main_formats
def test_gathered_experts(format):
    q = eqq.quantize(normal(4, 64, 48), format)
    x, ids = normal(5, 64, seed=1), jnp.asarray([3, 0, 0, 1, -1])
    assert_same(gathered, x, q, ids, packed=True, read=1)
    assert_same(taken, q, ids, packed="result", tolerance=1e-6)


def test_gathered_experts_in_other_ways():
    q = eqq.quantize(normal(4, 64, 48), "int8")
    ids = jnp.asarray([[3, 0, 0], [1, 2, 2]])
    fns = (
        lambda w, ids: w[ids],
        lambda w, ids: jax.vmap(lambda i: w[i])(ids[0]),
        lambda w, ids: jax.vmap(jax.vmap(lambda i: jnp.take(w, i, axis=0)))(ids),
        lambda w, ids: jnp.take(w, ids, axis=0, mode="clip"),
        lambda w, ids: w[ids[0, 0]],
        lambda w, ids: w.at[ids].get(mode="fill", fill_value=jnp.nan),
    )
    every = lambda w, ids: [fn(w, ids) for fn in fns]
    assert_same(every, q, ids, packed="result", tolerance=1e-6)
    # These need numbers.
    others = lambda w, ids: [
        w.at[ids + 2].get(mode="fill", fill_value=3.0),
        w[ids, ids],
        w[:, ids],
    ]
    assert_same(others, q, ids)


def test_rows():
    q = eqq.quantize(normal(50, 64), axis=-1)
    ids = jnp.asarray([[3, 0, 49], [1, 2, 2]])
    fns = (
        lambda w, ids: w[ids],
        lambda w, ids: w[ids[0, 0]],
        lambda w, ids: w[7],
        lambda w, ids: jnp.take(w, ids, axis=0),
        lambda w, ids: jnp.take(w, ids + 20, axis=0),
        lambda w, ids: jnp.take(w, ids + 20, axis=0, mode="fill", fill_value=1.0),
        lambda w, ids: jnp.take(w, ids, axis=0, mode="clip"),
        lambda w, ids: jax.vmap(lambda i: w[i])(ids[0]),
        lambda w, ids: jnp.take(w.T, ids, axis=1),
        lambda w, ids: jnp.take(w, ids.astype(jnp.uint8), axis=0),
    )
    every = lambda w, ids: [fn(w, ids) for fn in fns]
    assert_same(every, q, ids, packed=True, tolerance=1e-6)
    assert_same(lambda w, ids: jnp.take(w, ids, axis=1), q, ids)


def test_qtake():
    q = eqq.quantize(normal(50, 64), axis=-1)
    ids = jnp.asarray([3, 0, 49])
    assert_close(qtake(q, ids), q.dequantize()[ids])
    assert_close(qtake(q, 3), q.dequantize()[3])
    assert_close(qtake(q.T, ids, axis=1), q.dequantize()[ids].T)
    assert_close(qtake(normal(50, 64), ids, mode="clip"), normal(50, 64)[ids])
    experts = eqq.quantize(normal(4, 64, 48))
    some = qtake(experts, jnp.asarray([3, 1]))
    assert eqq.is_quantized(some)
    x = normal(2, 64, seed=1)
    expected = jnp.einsum("ti,tio->to", x, some.dequantize())
    assert_close(qeinsum("ti,tio->to", x, some), expected)


def test_group_sizes_of_few_bits():
    # The sizes count further than their own dtype.
    q = eqq.quantize(normal(2, 16, 16), "int8")
    x, sizes = normal(300, 16, seed=1), jnp.asarray([200, 100])
    few = implicit(lax.ragged_dot)(x, q, sizes.astype(jnp.uint8))
    assert_close(few, lax.ragged_dot(x, q.dequantize(), sizes))
