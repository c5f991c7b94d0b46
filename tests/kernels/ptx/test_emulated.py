import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.kernels._adapted import of_base
from eqquant.kernels.gpu.ptx import _product

from ...helpers import error, normal
from ...laws.test_declared_bounds import hostile
from ...laws.test_not_finite import inputs
from . import emulate
from .kinds import kernel_of, kinds, problem_of, rounded, weight


# The sources themselves, lane by lane, against sums in float64.


pytestmark = pytest.mark.skipif(emulate.compiler is None, reason="needs a C++ compiler")
# A kernel of each way to read codes and scales. Tests of the others are `thorough`.
quick = ("int4", "int4-32-float16", "int-2", "nf4", "int4-affine-channel", "mlx")
quick += ("int-8-zero-point", "binary-128", "fp8", "int8", "mxfp8", "nvfp4", "int-3-16")
quick += ("int-6-64", "iq4_xs", "q4_k", "q6_k")
every = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in quick else pytest.mark.thorough)
        for name in kinds
    ],
)


def product(x, q):
    """Without rounding the result."""
    problem = problem_of(x, q, jnp.float32)
    return emulate.run(kernel_of(q.format), x, q.stored, problem)


def check(x, q, name):
    y = product(x, q)
    assert error(y, np.asarray(x, np.float64), q.dequantize()) < bound(x, q, name)


def bound(x, q, name):
    problem = problem_of(x, q)
    if kernel_of(q.format) is not _product.bfloat16_mma:
        problem = of_base(problem)
    if name in rounded:
        return _product.error(problem)
    # In the emulator, sums are rounded as in float32 or better. (Minima are added to
    # sums of codes plus 128.)
    return 2e-5 if offset_of(q) == "minimum" else 1e-6


def offset_of(q):
    format = q.format
    return getattr(format, "base", format).offset


# Rows of the weight that fill no tile; columns that fill no step, no word and no byte.
@pytest.mark.examples(6)
@every
@pytest.mark.parametrize("k, n", ((1024, 32), (333, 19), (70, 1), (1, 17)))
def test_every_kind(name, k, n):
    x = jnp.asarray(normal(3, k, seed=1), jnp.bfloat16)
    check(x, weight(k, n, kinds[name]), name)


@pytest.mark.examples(8)
@pytest.mark.parametrize("name", ("int4", "nf4", "mlx", "nvfp4", "q4_k", "q6_k"))
@pytest.mark.parametrize("m", (1, 2, 7, 8, 9, 16, 17, 24, 31, 32, 40, 48, 57, 64, 130))
def test_rows(name, m):
    x = jnp.asarray(normal(m, 600, seed=1), jnp.bfloat16)
    check(x, weight(600, 40, kinds[name]), name)


# Inputs of other dtypes are sums of numbers of bfloat16.
@pytest.mark.examples(3)
@pytest.mark.parametrize("name", ("int4", "nf4", "int8-32", "nvfp4", "q4_k"))
@pytest.mark.parametrize("m, dtype", ((3, jnp.float16), (30, jnp.float32)), ids=str)
def test_dtypes(name, m, dtype):
    x = jnp.asarray(normal(m, 333, seed=1), dtype)
    check(x, weight(333, 19, kinds[name]), name)


# A long row is split over blocks.
@pytest.mark.examples(3)
@pytest.mark.parametrize("name", ("int4", "int8", "fp4", "nvfp4", "q6_k"))
def test_splits(name):
    k = 20000
    x = jnp.asarray(normal(2, k, seed=1), jnp.bfloat16)
    check(x, weight(k, 5, kinds[name]), name)


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ("int4-128", "int8", "nvfp4", "q4_k"))
def test_stacks(name):
    w = normal(3, 2, 20, 300)
    q = eqq.tree_prepack(eqq.quantize(w, kinds[name], axis=-1), platform="gpu").mT
    x = jnp.asarray(normal(3, 2, 4, 300, seed=1), jnp.bfloat16)
    problem = problem_of(x, q, jnp.float32)

    def fn(x, stored):
        return kernel_of(q.format)(x, stored, problem)

    def stacks(x, stored, _):
        return jax.vmap(jax.vmap(fn))(x, stored)

    y = emulate.run(stacks, x, q.stored, problem)
    for i, j in np.ndindex(3, 2):
        x_, w_ = np.asarray(x[i, j], np.float64), q[i, j].dequantize()
        assert error(y[i, j], x_, w_) < bound(x[i, j], q[i, j], name)


# As `quantize` lays them: the contracted axis first.
def test_contracted_axis_first():
    q = eqq.quantize(normal(333, 19), "int4")
    check(jnp.asarray(normal(3, 333, seed=1), jnp.bfloat16), q, "int4")


@pytest.mark.examples(4)
@every
def test_hostile_inputs(name):
    x = jnp.asarray(hostile(333, 16), jnp.bfloat16)
    q = weight(333, 19, kinds[name])
    y, w = product(x, q), np.asarray(q.dequantize(), np.float64)
    x = np.asarray(x, np.float64)
    # (Sums of the smallest numbers are zeros.)
    near = bound(x, q, name) if name in rounded else 4e-3
    assert np.all(np.abs(y - x @ w) <= near * (np.abs(x) @ np.abs(w)) + 1e-34)


def with_stored(q, **arrays):
    leaves = jtu.tree_leaves(q.stored | jtu.tree_map(jnp.asarray, arrays))
    return jtu.tree_unflatten(jtu.tree_structure(q), leaves)


def of_blocks(q):
    """The bytes of blocks, and where their numbers in float16 are."""
    blocks = np.array(q.stored["blocks"])
    blocks = blocks.reshape(len(blocks), -1, q.format.type_size)
    at = q.format.scale_at
    return blocks, np.s_[..., at : at + 2 * q.format.halves]


# Also those that `quantize` does not write; among those of `fp8` are NaNs.
@pytest.mark.examples(9)
@every
def test_every_code(name):
    q, rng = weight(333, 19, kinds[name]), np.random.default_rng(0)
    if "blocks" in q.stored:
        blocks, halves = of_blocks(q)
        found = rng.integers(0, 256, blocks.shape).astype(np.uint8)
        found[halves] = blocks[halves]
        q = with_stored(q, blocks=found.reshape(len(found), -1))
    else:
        codes = np.array(q.stored["codes"])
        # (Of 16 rows, all are numbers.)
        few = np.arange(0x7F).astype(np.uint8)
        some = rng.choice(few, codes.shape) | rng.choice([0, 128], codes.shape)
        all_codes = rng.integers(0, 256, codes.shape)
        found = np.where(np.arange(19)[:, None] < 16, some, all_codes).astype(np.uint8)
        q = with_stored(q, codes=found.view(codes.dtype))
    x = jnp.asarray(normal(3, 333, seed=1), jnp.bfloat16)
    y, w = np.asarray(product(x, q)), np.asarray(q.dequantize(), np.float64)
    near, x = bound(x, q, name), np.asarray(x, np.float64)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x @ w))
    assert np.isnan(y).any() == name.startswith(("fp8", "mxfp8"))
    assert np.nanmax(np.abs(y - x @ w) / (np.abs(x) @ np.abs(w))) < near


# Every scale of one byte.
@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ("mxfp4", "nvfp4", "nvfp4-inverse"))
def test_every_scale(name):
    q = weight(512, 64, kinds[name])
    scale = np.arange(q.stored["scale"].size) % 256
    q = with_stored(q, scale=scale.reshape(64, -1).astype(np.uint8))
    # (A number for each scale.)
    for i in range(0, 16, 5):
        x = np.zeros((32, 512), jnp.bfloat16)
        x[np.arange(32), np.arange(i, 512, 16)] = 1
        x = jnp.asarray(x)
        y, w = np.asarray(product(x, q)), np.asarray(q.dequantize(), np.float64)
        exact = np.asarray(x, np.float64)
        with np.errstate(invalid="ignore"):
            exact = exact @ w
        np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
        np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-38)


# What is not finite comes out as of the decoded weight; but a block whose scale is
# infinite, and whose numbers have one sign, is NaN and not infinite, and so may
# be the product of an infinite input with blocks that have minima.
@pytest.mark.examples(6)
@every
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
def test_not_finite(name, dtype):
    q = weight(333, 19, kinds[name])
    q = with_stored(q, **wild(q))
    x, minima = jnp.asarray(inputs(333, 12), dtype), offset_of(q) == "minimum"
    y, w = product(x, q), np.asarray(q.dequantize(), np.float64)
    exact = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
        exact, size = exact @ w, np.abs(exact) @ np.abs(w)
    exact[np.isinf(w).any(axis=0) & np.isinf(exact)] = np.nan
    if minima:
        exact[np.isinf(exact) & np.isnan(y)] = np.nan
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    np.testing.assert_array_equal(y[np.isinf(exact)], exact[np.isinf(exact)])
    finite = np.isfinite(exact)
    assert finite.any() and (np.isinf(exact).any() or minima)
    near = bound(x, q, name) if name in rounded else 4e-3
    assert np.all(np.abs(y - exact)[finite] <= near * size[finite])


def wild(q):
    """Scales of the last block of the first rows that are not finite, and zeros."""
    if "blocks" in q.stored:
        blocks, halves = of_blocks(q)
        each = np.array([np.nan, np.inf, -np.inf, 0], np.float16).view(np.uint8)
        blocks[:4, -1:][halves][..., :2] = each.reshape(4, 1, 2)
        return dict(blocks=blocks.reshape(len(blocks), -1))
    bits = np.array(q.stored["scale"])
    if bits.shape[0] > 1:
        if bits.dtype == np.uint8:
            each = np.array([0x7F, 0xFF, 0, 1], np.uint8)
        else:
            each = np.array([np.nan, np.inf, -np.inf, 0], q.format.scale_dtype)
        bits[:4, -1] = each.view(bits.dtype)
    return dict(scale=bits)


# All numbers of float32 that are not among the smallest are three of bfloat16.
@pytest.mark.parametrize("dtype, number", ((jnp.float16, 2), (jnp.float32, 3)))
def test_parts(dtype, number):
    x = np.array([*normal(200), 0, -0.0, np.inf, -np.inf, np.nan], dtype)
    x = np.append(x, np.array([jnp.finfo(dtype).max, jnp.finfo(dtype).tiny], dtype))
    parts = jax.jit(_product.parts_of)(jnp.asarray(x)[None])
    assert len(parts) == number
    with np.errstate(invalid="ignore"):
        total = np.sum([np.asarray(part[0], np.float64) for part in parts], axis=0)
    np.testing.assert_array_equal(total, x.astype(np.float64))


# (The emulator would not see what it does not look for.)
@pytest.mark.parametrize(
    "change, complaint",
    (
        (dict(row_bytes=1), "unaligned"),
        (dict(row_bytes=1024), "reads what is not there"),
        (dict(rows=-1), "does not write everything"),
        (dict(n=16), "writes what is not there"),
    ),
)
def test_the_emulator_complains(monkeypatch, change, complaint):
    source_of, ((name, more),) = _product.source_of, change.items()

    def other(*args, **sizes):
        return source_of(*args, **sizes | {name: sizes[name] + more})

    monkeypatch.setattr(_product, "source_of", other)
    x = jnp.asarray(normal(3, 333, seed=1), jnp.bfloat16)
    with pytest.raises(Exception, match=complaint):
        jax.block_until_ready(product(x, weight(333, 19, kinds["int4"])))
