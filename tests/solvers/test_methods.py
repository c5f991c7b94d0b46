import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._solvers import solved
from eqquant.formats import AbstractAdjustable, Layout

from ..helpers import decode, each, encode, formats, normal
from ..raises import raises
from . import oracle


methods = [eqq.ScaleSearch(), eqq.GPTQ(passes=1, tries=2)]
few = ("nf4-bfloat16-scales", "int4-affine", "int-3-minimum", "ternary-tensor")
adjustable = [k for k, f in formats.items() if isinstance(f, AbstractAdjustable)]
# For what takes long to compile: one of each kind.
main = (
    *(*few, "int8", "q4_0", "binary-128", "fp8-e5m2-tensor", "dynamic8", "q5_1"),
    *("q4_k", "q6_k", "mxfp4", "mxfp8", "nvfp4", "nested", "bnb-double"),
    *("iq4_nl", "iq4_xs"),
)
# Some of what is stored belongs to all rows: then their sum is no worse.
shared = ("fp8-e5m2-tensor", "ternary-tensor", "bnb-double")
composites = ("mxfp4", "mxfp8", "nvfp4", "nested", "bnb-double")


def numbers(stored, format, k):
    return np.asarray(decode(Layout(format).trimmed(stored, k), stored))


# Two programs may round scales otherwise, and then a few codes.
def same(a, b):
    assert np.mean(np.abs(a - b) <= 1e-5 * np.max(np.abs(b))) > 0.98


# An odd size, so that the last block is short.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", each(adjustable))
def test_no_row_is_worse_than_rounded_to_nearest(name):
    format, k = formats[name], 200
    w = normal(5, k, seed=2)
    h = oracle.gram(oracle.inputs("correlated", k))
    plain = numbers(encode(format, w), format, k)
    for method in methods if name in main else methods[:1]:
        stored = method.solve(w, format, jnp.asarray(h))
        like = jax.eval_shape(format.encode, w)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), stored) == jax.tree.map(
            lambda a: (a.shape, a.dtype), like
        )
        found = numbers(stored, format, k)
        measure = h if isinstance(method, eqq.GPTQ) else np.diag(np.diag(h))
        old, new = (oracle.error(w, q, measure) for q in (plain, found))
        if name in shared:
            old, new = np.sum(old), np.sum(new)
        assert np.all(new <= old * (1 + 1e-4))
        assert np.sum(new) < 0.9999 * np.sum(old)


# What comes back is what was chosen: scales are rounded before codes are.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", few)
@pytest.mark.parametrize("method", methods, ids=str)
def test_what_is_stored_is_what_was_chosen(name, method):
    format, k = formats[name], 128
    w = normal(6, k, seed=4)
    h = jnp.asarray(oracle.gram(oracle.inputs("correlated", k)))
    grid = format.grid

    @jax.jit
    def believe(w, h):
        codes, parameters = method.choose(w, format, h, None, None)
        return grid.numbers(grid.to_points(codes), *parameters).reshape(6, k)

    believed = believe(w, h)
    found = numbers(method.solve(w, format, h), format, k)
    scale = np.max(np.abs(found))
    np.testing.assert_allclose(found, np.asarray(believed), atol=1e-6 * scale)


# A K type rounds the scales of blocks together, so its codes are chosen twice.
@pytest.mark.thorough
@pytest.mark.parametrize("name", ("q4_k", "q6_k"))
def test_codes_are_those_of_the_scales_that_are_read(name):
    format, w = formats[name], normal(6, 512, seed=4)
    found = eqq.ScaleSearch().solve(w, format)
    plain = numbers(encode(format, w), format, 512)
    new = numbers(found, format, 512)
    codes, scale, low = format.split_blocks(
        jnp.asarray(found["blocks"]).reshape(6, 2, format.type_size)
    )
    size = format.base.block_size
    blocks = np.asarray(w, np.float64).reshape(*scale.shape, size)
    scale = np.asarray(scale, np.float64)[..., None]
    low = 0 if low is None else np.asarray(low, np.float64)[..., None]
    zero = format.base.levels // 2 if format.base.offset is None else 0
    nearest = np.clip(
        np.round((blocks - low) / np.where(scale == 0, 1, scale)) + zero,
        0,
        format.base.levels - 1,
    )
    chosen = np.asarray(codes).reshape(blocks.shape)
    # (A row that would be worse is as it was rounded to nearest.)
    rows = np.any(new != plain, axis=1)
    assert np.sum(rows) >= 3
    assert np.mean((chosen == nearest)[rows]) > 0.999
    assert np.sum((new - np.asarray(w)) ** 2) < np.sum((plain - np.asarray(w)) ** 2)


# Likewise of formats whose scales have few bits, or are stored in another format.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", composites)
def test_codes_are_the_nearest(name):
    format, w = formats[name], normal(6, 500, seed=4)
    plain = numbers(encode(format, w), format, 500)
    stored = eqq.ScaleSearch().solve(w, format)
    found = numbers(stored, format, 500)
    _, scale, _ = oracle.parts(format.flat(stored, 0), format.base, 500)
    every = np.arange(format.base.levels, dtype=np.uint8)
    points = jax.jit(format.base.to_points)(every)
    points = np.asarray(points, np.float64)
    points = points[np.isfinite(points)]
    x = np.asarray(w, np.float64)
    far = np.min(np.abs(points * scale[..., None] - x[..., None]), -1)
    rows = np.any(found != plain, axis=1)
    assert np.sum(rows) >= 3
    np.testing.assert_allclose(np.abs(found - x)[rows], far[rows], atol=1e-5)


# So its rows are as they are with others, and none is worse.
@pytest.mark.thorough
@pytest.mark.parametrize("inverse", (False, True))
def test_nvfp4_keeps_the_scale_of_the_matrix(inverse):
    format = eqq.NVFP4(inverse=inverse)
    w = normal(4, 64) * jnp.asarray([1, 1e-2, 1e-4, 1e3])[:, None]
    plain, found = encode(format, w), eqq.ScaleSearch().solve(w, format)
    np.testing.assert_array_equal(found["global_scale"], plain["global_scale"])
    old, new = (numbers(s, format, 64) for s in (plain, found))
    old, new = (np.sum((np.asarray(w) - q) ** 2, -1) for q in (old, new))
    assert np.all(new <= old * 1.0001) and np.any(new < 0.95 * old)


# (Ties towards zero, as ggml rounds, leave no negative zero.)
def test_mxfp4_of_ggml_has_no_negative_zero():
    w, format = normal(4, 64), eqq.MXFP4(ties="zero")
    stored = eqq.ScaleSearch().solve(w, format)
    codes = np.asarray(format.base.unpack(stored["codes"], 0))
    assert np.all(codes != 8)
    assert np.any(codes > 8)


# A number beyond the ends becomes the largest; a cast alone would make it NaN.
@pytest.mark.parametrize(
    "grid, largest", [(eqq.FP8(), 448), (eqq.FP8("e5m2"), 57344), (eqq.FP4(), 6)]
)
def test_numbers_beyond_the_ends(grid, largest):
    one = jnp.ones((1, 1))
    x = jnp.asarray([[1.01, 1e3, 1e38, -1.01, -1e3, -1e38]]) * largest
    codes = grid.to_codes(x, np.full((1, 1), 6), one)
    np.testing.assert_array_equal(
        grid.to_points(codes)[0], np.array([1, 1, 1, -1, -1, -1]) * largest
    )


# Blocks of zeros, and numbers that are nearly subnormal.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", (*composites, "fp8", "fp4"))
@pytest.mark.parametrize("size", (1.0, 1e-30, 1e-37, 1e30))
def test_zeros_and_small_numbers(name, size):
    format = formats[name]
    w = (normal(3, 96) * size).at[:, 32:64].set(0).at[1].set(0)
    plain, found = (
        numbers(stored, format, 96).astype(np.float64)
        for stored in (encode(format, w), eqq.ScaleSearch().solve(w, format))
    )
    assert np.all(found[1] == plain[1]) and np.all(np.isfinite(found))
    assert np.all(found[:, 32:64] == plain[:, 32:64])
    old, new = (np.sum((np.asarray(w) - q) ** 2) for q in (plain, found))
    assert new <= old * 1.0001


kinds = ("few", "dead", "twice", "none", "shifted")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", kinds)
def test_any_gram_will_do(kind):
    w, h = normal(4, 64), oracle.gram(oracle.inputs(kind, 64))
    format = eqq.Int(3, 32, "minimum")
    found = numbers(methods[1].solve(w, format, jnp.asarray(h)), format, 64)
    plain = numbers(encode(format, w), format, 64)
    assert np.all(np.isfinite(found))
    assert np.all(oracle.error(w, found, h) <= oracle.error(w, plain, h) * 1.0001)
    # Dead inputs do not let numbers go astray.
    assert np.max(np.abs(found - np.asarray(w))) < 1.5


# The scale by which the sum of squares is least, of all.
def test_search_finds_the_best_scale():
    w, format = normal(3, 16, seed=7), eqq.Int(2, 16)
    found = numbers(eqq.ScaleSearch().solve(w, format), format, 16)
    x = np.asarray(w, np.float64)[:, None]
    scales = np.concatenate([s := np.linspace(0.05, 3, 3000), -s])[None, :, None]
    every = np.clip(np.round(x / scales), -2, 1) * scales
    best = np.sum((x - every) ** 2, -1).min(-1)
    assert np.all(np.sum((w - found) ** 2, -1) <= best * 1.03)


def test_weights_of_a_search_count():
    w, format = normal(8, 64, seed=7), eqq.Int(2, 64)
    d = np.where(np.arange(64) < 8, 100, 1).astype(np.float32)
    plain = numbers(eqq.ScaleSearch().solve(w, format), format, 64)
    found = numbers(eqq.ScaleSearch().solve(w, format, jnp.asarray(d)), format, 64)
    full = eqq.ScaleSearch().solve(w, format, jnp.diag(jnp.asarray(d)))
    np.testing.assert_array_equal(numbers(full, format, 64), found)
    loss = lambda q: np.sum(d * (np.asarray(w) - q) ** 2)
    assert loss(found) < 0.9 * loss(plain)


@pytest.mark.examples(1)
@pytest.mark.parametrize("method", methods, ids=str)
def test_stacks(method):
    format, w = eqq.Int4(32, symmetric=False), normal(2, 3, 4, 64)
    h = jnp.stack(
        [oracle.gram(oracle.inputs("correlated", 64, seed=i)) for i in (0, 1)]
    )
    rows = jnp.full((2, 1), 1024.0)
    stored = method.solve(w, format, h[:, None], rows)
    for i in range(2):
        for j in range(3):
            one = method.solve(w[i, j], format, h[i], rows[i, 0])
            found = jax.tree.map(lambda a: a[i, j], stored)
            same(numbers(found, format, 64), numbers(one, format, 64))


@pytest.mark.thorough
def test_solved():
    method, format, w = methods[1], eqq.NF4(32), normal(64, 8)
    h = oracle.gram(oracle.inputs("correlated", 64))
    q = solved(w, format, method, h[None])
    assert (q.shape, q.axis, q.format) == ((64, 8), -2, format)
    one = solved(w.T, "nf4", None, axis=-1)
    assert one.format == eqq.NF4()
    plain = numbers(method.solve(w.T, format, jnp.asarray(h)), format, 64)
    same(np.asarray(q.dequantize()).T, plain)
    traced = jax.jit(lambda w, h: solved(w, format, method, h).dequantize())(w, h[None])
    same(np.asarray(traced).T, plain)
    # Several axes, an order of axes, and rows with Grams of their own.
    kernel = normal(4, 2, 4, 8, dtype=jnp.bfloat16)
    both = np.stack([h[:16, :16], h[32:48, 32:48]])[:, None]
    q = solved(kernel, format, method, both, axis=(1, 3))
    rows = kernel.transpose(0, 2, 1, 3).reshape(4, 4, 16)
    wanted = [
        numbers(method.solve(rows[i], format, jnp.asarray(both[i // 2, 0])), format, 16)
        for i in range(4)
    ]
    wanted = np.stack(wanted).reshape(4, 4, 2, 8).transpose(0, 2, 1, 3)
    same(
        np.asarray(q.dequantize(), np.float32),
        np.asarray(wanted, jnp.bfloat16).astype(np.float32),
    )
    assert q.dtype == jnp.bfloat16 and q.shape == kernel.shape
    vector = solved(w[:, 0], format, method, h)
    same(np.asarray(vector.dequantize()), plain[0])


@pytest.mark.thorough
def test_rows_of_a_matrix_with_grams_of_their_own():
    method, format, w = methods[1], eqq.NF4(32), normal(8, 64)
    h = np.stack([oracle.gram(oracle.inputs("correlated", 64, seed=i)) for i in (0, 1)])
    q = solved(w, format, method, h, axis=-1)
    for i in range(2):
        half = slice(4 * i, 4 * i + 4)
        one = solved(w[half], format, method, h[i : i + 1], axis=-1)
        same(np.asarray(q.dequantize())[half], np.asarray(one.dequantize()))


# Groups of rows with Grams of their own, that share a scale, count as one.
@pytest.mark.thorough
@pytest.mark.parametrize("name", ("ternary-tensor", "nvfp4", "int-4-ordered"))
def test_rows_that_share_a_scale(name):
    method, format, w = methods[1], formats[name], normal(8, 64)
    h = np.stack([oracle.gram(oracle.inputs("correlated", 64, seed=i)) for i in (0, 1)])
    q = solved(w, format, method, h, np.full(2, 1024, np.float32), axis=-1)
    one = solved(w, format, method, h.sum(0)[None], np.full(1, 2048.0), axis=-1)
    same(np.asarray(q.dequantize()), np.asarray(one.dequantize()))


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "name", ("int4", "q4_k", "q6_k", "q5_1", "mxfp4", "mxfp8", "nested")
)
def test_traced_numbers_that_are_not_finite(name):
    method, format, k = methods[1], formats[name], 320
    size = format.block_size * (32 if name == "nested" else 1)
    h = oracle.gram(oracle.inputs("correlated", k))
    w = normal(4, k).at[1, 300].set(jnp.nan)
    found = jax.jit(lambda w: solved(w, format, method, h[None], axis=-1).dequantize())
    found = np.asarray(found(w))
    block = slice(300 // size * size, min(300 // size * size + size, k))
    assert np.all(np.isnan(found[1, block]))
    assert np.all(np.isfinite(found[[0, 2, 3]]))


class Counted(eqq.ScaleSearch):
    """Counts how often it is traced."""

    def choose(self, *args):
        traced.append(args[0].shape)
        return super().choose(*args)


traced = []


# A row that is one block, whose columns are swept many at once.
@pytest.mark.examples(1)
@pytest.mark.parametrize("order", ("groups", "act", "none"))
def test_one_block_of_any_size(order):
    method = eqq.GPTQ(order=order, passes=0)
    w = normal(3, 200, seed=2)
    h = jnp.asarray(oracle.gram(oracle.inputs("correlated", 200)))
    format = eqq.Int8()
    found = numbers(method.solve(w, format, h), format, 200)
    plain = numbers(encode(format, w), format, 200)
    new, old = (oracle.error(w, q, np.asarray(h)) for q in (found, plain))
    assert np.all(new < 0.9 * old)


# Where JAX makes arrays of 64 bits by default, all is computed in float32 still.
@pytest.mark.thorough
@pytest.mark.parametrize("name", each(main))
def test_with_64_bits(name):
    format, k = formats[name], 200
    w = normal(5, k, seed=2)
    h = jnp.asarray(oracle.gram(oracle.inputs("correlated", k)))
    others = eqq.GPTQ(order="act"), eqq.HQQ(), eqq.HQQ(search=True)
    for method in (*methods, *others):
        found = numbers(method.solve(w, format, h), format, k)
        with jax.enable_x64(True):
            wide = method.solve(w, format, h)
        same(numbers(wide, format, k), found)


def test_one_program_for_one_shape():
    w, h = normal(4, 32), jnp.eye(32)
    for i in range(3):
        Counted().solve(w + i, eqq.Int8(), (i + 1) * h)
        solved(w + i, eqq.Int4(), Counted(), (i + 1) * h[None], axis=-1)
    assert traced == [(4, 32)] * 2


def test_errors():
    w, h = normal(4, 32), np.eye(32, dtype=np.float32)
    with raises(ValueError, "method", "GPTQ", "needs the Gram"):
        solved(w, "int4", eqq.GPTQ(), axis=-1)
    with raises(ValueError, "method", "ScaleSearch", "RSRBinary"):
        solved(w, eqq.RSRBinary(8), eqq.ScaleSearch(), axis=-1)
    with raises(ValueError, "gram", r"\(4, 32, 32\)", r"\(32, 32\)"):
        solved(w, "int4", eqq.GPTQ(), h, axis=-1)
    with raises(ValueError, "gram", r"\(16, 16\)"):
        eqq.GPTQ().solve(w, eqq.Int4(), jnp.eye(16))
    with raises(ValueError, "gram", "finite"):
        solved(w, "int4", eqq.GPTQ(), h[None] * np.nan, axis=-1)
    with raises(ValueError, "rows"):
        solved(w, "int4", eqq.GPTQ(), h[None], np.ones(2, np.float32), axis=-1)
    with raises(ValueError, "w", "finite"):
        solved(w * np.float32(np.inf), "int4", eqq.ScaleSearch(), axis=-1)
    with raises(ValueError, "tries", "0"):
        eqq.GPTQ(tries=0)
    with raises(ValueError, "damping", "-1"):
        eqq.ScaleSearch(damping=-1.0)


@pytest.mark.parametrize(
    "method, field, kind",
    (
        (eqq.GPTQ, "damping", "a number"),
        (eqq.GPTQ, "passes", "an integer"),
        (eqq.GPTQ, "tries", "an integer"),
        (eqq.AWQ, "tries", "an integer"),
        (eqq.HQQ, "steps", "an integer"),
        (eqq.HQQ, "kappa", "a number"),
        (eqq.ScaleSearch, "damping", "a number"),
    ),
)
def test_fields_of_the_wrong_type(method, field, kind, unchecked):
    for value in ("x", True, *([1.5] if kind == "an integer" else [])):
        with raises(TypeError, field, kind, f"Got {value!r}"):
            method(**{field: value})
