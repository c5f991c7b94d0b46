import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._product import splits_evenly

from ..helpers import error, formats, many_at_once, normal
from .meshes import collectives, kinds, mesh, put, run, shard


all_kinds = pytest.mark.parametrize("kind", kinds)
k, n, m = 512, 256, 16


def product(x, q):
    return eqq.qmatmul(x, q, precision="highest")


def gradient(x, q):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(product(x, q) / 8)))(x)


# Shapes of meshes, specs of rows and weights; what a product sends, and its derivative.
reduced, reduced_back = ["f32[16,256]"], ["f32[16,512]"]
cases = {
    "column": ((8,), (), (None, "a"), {}, {"all-reduce": reduced_back}),
    "row": (
        (8,),
        (None, "a"),
        ("a",),
        {"all-reduce": reduced},
        {"all-reduce": reduced},
    ),
    "data": ((8,), ("a",), (), {}, {}),
    "data, column": (
        (2, 4),
        ("a",),
        (None, "b"),
        {},
        {"all-reduce": ["f32[8,512]"]},
    ),
    "data, row": (
        (2, 4),
        ("a", "b"),
        ("b",),
        {"all-reduce": ["f32[8,256]"]},
        {"all-reduce": ["f32[8,256]"]},
    ),
    "rows whole, weight in both": (
        (2, 4),
        (),
        ("a", "b"),
        {"all-reduce": ["f32[16,64]"]},
        None,
    ),
}


@pytest.mark.examples(2)
@all_kinds
@pytest.mark.parametrize("name", ("nf4", "int8", "rotated"))
@pytest.mark.parametrize("case", cases)
def test_collectives(case, name, kind):
    shape, x_spec, w_spec, forward, backward = cases[case]
    on = mesh(kind, *shape)
    q, x = eqq.quantize(normal(k, n), formats[name]), normal(m, k)
    w = q.dequantize()
    sharded, placed = shard(q, on, *w_spec), put(x, on, *x_spec)
    y, sent = run(product, placed, sharded)
    assert sent == forward
    assert error(y, x, w) < 1e-6
    with jax.set_mesh(on):
        found, sent = run(gradient, placed, sharded)
    assert backward is None or sent == backward
    np.testing.assert_allclose(found, jax.jit(gradient)(x, w), atol=1e-5)


# Fully sharded: the devices that have different rows send each other packed codes.
@pytest.mark.examples(2)
@all_kinds
@pytest.mark.parametrize("w_spec", (("a",), ("a", "b")))
def test_codes_are_gathered(w_spec, kind):
    on = mesh(kind, 2, 4)
    q, x = eqq.quantize(normal(k, n)), normal(96, k)
    sharded, placed = shard(q, on, *w_spec), put(x, on, "a")
    n_here = 64 if len(w_spec) == 2 else 256
    y, sent = run(product, placed, sharded)
    codes = [f"u8[256,{n_here}]", f"u32[8,{n_here}]"]
    assert {name: sorted(shapes) for name, shapes in sent.items()} == {
        "all-gather": sorted(codes)
    }
    with jax.set_mesh(on):
        found, sent = run(gradient, placed, sharded)
    for shapes in sent.values():
        assert f"f32[{k},{n_here}]" not in shapes
        assert f"f32[{n_here},{k}]" not in shapes
    assert error(y, x, q.dequantize()) < 1e-6
    expected = jax.jit(gradient)(x, q.dequantize())
    np.testing.assert_allclose(found, expected, atol=1e-5)


# Where the result is to be split, what would be summed everywhere is not.
@pytest.mark.parametrize("spec", (("a",), (None, "a")))
def test_reduce_scatter(spec):
    on = mesh("auto", 8)
    q, x = shard(eqq.quantize(normal(k, n)), on, "a"), put(normal(m, k), on, None, "a")
    out = NamedSharding(on, P(*spec))

    def fn(x, q):
        return lax.with_sharding_constraint(product(x, q), out)

    y, sent = run(fn, x, q)
    (name,) = sent
    assert name == "reduce-scatter" and len(sent[name]) == 1
    assert error(y, normal(m, k), q.dequantize()) < 1e-6


@pytest.mark.examples(2)
@all_kinds
@pytest.mark.parametrize(
    "spec, sums", ((("a",), 0), (("a", None, "b"), 0), (("a", "b"), 1))
)
def test_experts(spec, sums, kind):
    on = mesh(kind, 2, 4)
    q, x = eqq.quantize(normal(4, k, n), eqq.Int8(32)), normal(4, m, k)
    placed = put(x, on, "a", None, "b" if sums else None)
    y, sent = run(jax.vmap(product), placed, shard(q, on, *spec))
    assert sent == ({"all-reduce": ["f32[2,16,256]"]} if sums else {})
    y = np.asarray(y)
    for i in range(4):
        assert error(y[i], x[i], q[i].dequantize()) < 1e-6


# Rows on several axes, each of which is split.
@all_kinds
def test_rows_of_any_rank(kind):
    on = mesh(kind, 2, 4)
    q, x = eqq.quantize(normal(n, k), axis=-1), normal(4, 8, k)
    layer = jax.vmap(jax.vmap(lambda x, q: product(q, x), (0, None)), (0, None))
    placed, sharded = put(x, on, "a", "b"), shard(q, on)
    y, sent = run(layer, placed, sharded)
    assert sent == {}
    assert y.sharding.is_equivalent_to(placed.sharding, 3)
    assert error(y.reshape(32, n), x.reshape(32, k), q.dequantize().T) < 1e-6


# The scale of a row is that of all of it, though no device has all of it.
@all_kinds
def test_activations_are_rounded_by_whole_rows(kind):
    on = mesh(kind, 8)
    q, x = eqq.quantize(normal(k, n), "int8", activation="int8"), normal(m, k)
    y = jax.jit(product)(put(x, on, None, "a"), shard(q, on, "a"))
    np.testing.assert_allclose(y, product(x, q), rtol=1e-4, atol=1e-4)


# Nothing is declared, but where the arrays are is known: or which mesh they are on.
def test_undeclared():
    on = mesh("auto", 8)
    q = shard(eqq.quantize(normal(k, n)), on, None, "a").with_sharding(None)
    x = put(normal(m, k), on)
    assert q.sharding is None and q.is_sharded
    assert collectives(lambda x: product(x, q), x) == {}
    with jax.set_mesh(on):
        assert collectives(product, x, q) == {}


def test_a_mesh_that_is_set():
    on = mesh("auto", 8)
    stored = shard(eqq.quantize(normal(k, n)), on, "a").with_sharding(P("a"))
    with jax.set_mesh(on):
        sent = collectives(product, put(normal(m, k), on, None, "a"), stored)
    assert sent == {"all-reduce": reduced}


# Law 6, for every format: in one program, as compiling takes the most of the time.
@pytest.mark.thorough
@many_at_once
def test_every_format(names):
    on = mesh("auto", 4, 2)
    x, w = normal(4, 1280), normal(1280, 16)
    fits, sizes = {}, {}
    for name in names:
        format = formats[name]
        # (Five codes of some are a byte.)
        fit = [size for size in (512, 960, 1280) if splits_evenly(format, (), size, 2)]
        fits[name], sizes[name] = bool(fit), fit[0] if fit else 512

    @jax.jit
    def quantized(w):
        return {
            name: eqq.quantize(w[:size], formats[name]) for name, size in sizes.items()
        }

    fn = ft.partial(eqq.qmatmul, kernel="reference")

    @jax.jit
    def products(x, arrays):
        return {name: fn(x[:, : q.shape[0]], q) for name, q in arrays.items()}

    arrays = quantized(w)
    sharded = {
        n: shard(q, on, "b" if fits[n] else None, "a") for n, q in arrays.items()
    }
    found, dense = products(put(x, on), sharded), jax.jit(eqq.tree_dequantize)(arrays)
    for name, size in sizes.items():
        assert error(found[name], x[:, :size], dense[name]) < 1e-5, name
