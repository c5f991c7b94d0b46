import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.kernels.gpu.ptx import _product

from ...helpers import error, normal
from ...laws.test_declared_bounds import hostile
from ...laws.test_not_finite import inputs
from . import emulate
from .kinds import kinds, problem_of, weight


# The sources themselves, lane by lane, against sums in float64.


pytestmark = pytest.mark.skipif(emulate.compiler is None, reason="needs a C++ compiler")
every = pytest.mark.parametrize("name", kinds)


def product(x, q):
    """Without rounding the result."""
    problem = problem_of(x, q, jnp.float32)
    return emulate.run(_product.bfloat16_mma, x, q.stored, problem)


def check(x, q, name):
    y = product(x, q)
    problem = problem_of(x, q)
    # In the emulator, sums are rounded as in float32 or better.
    bound = min(_product.error(problem), 4e-3 if "nf4" in name else 1e-6)
    assert error(y, np.asarray(x, np.float64), q.dequantize()) < bound


# Rows of the weight that fill no tile; columns that fill no step, no word and no byte.
@pytest.mark.examples(16)
@every
@pytest.mark.parametrize("k, n", ((1024, 32), (333, 19), (70, 1), (1, 17)))
def test_every_kind(name, k, n):
    x = jnp.asarray(normal(3, k, seed=1), jnp.bfloat16)
    check(x, weight(k, n, kinds[name]), name)


@pytest.mark.examples(16)
@pytest.mark.parametrize("name", ("int4", "nf4", "mlx"))
@pytest.mark.parametrize("m", (1, 2, 7, 8, 9, 16, 17, 24, 31, 32, 40, 48, 57, 63, 64))
def test_rows(name, m):
    x = jnp.asarray(normal(m, 600, seed=1), jnp.bfloat16)
    check(x, weight(600, 40, kinds[name]), name)


# Inputs of other dtypes are sums of numbers of bfloat16.
@pytest.mark.parametrize("name", ("int4", "nf4", "int8-32"))
@pytest.mark.parametrize("m, dtype", ((3, jnp.float16), (30, jnp.float32)), ids=str)
def test_dtypes(name, m, dtype):
    x = jnp.asarray(normal(m, 333, seed=1), dtype)
    check(x, weight(333, 19, kinds[name]), name)


# A long row is split over blocks.
@pytest.mark.parametrize("name", ("int4", "int8", "fp4"))
def test_splits(name):
    k = 20000
    x = jnp.asarray(normal(2, k, seed=1), jnp.bfloat16)
    check(x, weight(k, 5, kinds[name]), name)


@pytest.mark.parametrize("name", ("int4-128", "int8"))
def test_stacks(name):
    w = normal(3, 2, 20, 300)
    q = eqq.tree_prepack(eqq.quantize(w, kinds[name], axis=-1), platform="gpu").mT
    x = jnp.asarray(normal(3, 2, 4, 300, seed=1), jnp.bfloat16)
    problem = problem_of(x, q, jnp.float32)

    def fn(x, stored):
        return _product.bfloat16_mma(x, stored, problem)

    def stacks(x, stored, _):
        return jax.vmap(jax.vmap(fn))(x, stored)

    y = emulate.run(stacks, x, q.stored, problem)
    for i, j in np.ndindex(3, 2):
        x_, w_ = np.asarray(x[i, j], np.float64), q[i, j].dequantize()
        assert error(y[i, j], x_, w_) < 1e-6


# As `quantize` lays them: the contracted axis first.
def test_contracted_axis_first():
    q = eqq.quantize(normal(333, 19), "int4")
    check(jnp.asarray(normal(3, 333, seed=1), jnp.bfloat16), q, "int4")


@every
def test_hostile_inputs(name):
    x = jnp.asarray(hostile(333, 16), jnp.bfloat16)
    q = weight(333, 19, kinds[name])
    y, w = product(x, q), np.asarray(q.dequantize(), np.float64)
    x = np.asarray(x, np.float64)
    # (Sums of the smallest numbers are zeros.)
    near = 4e-3 * (np.abs(x) @ np.abs(w)) + 1e-34
    assert np.all(np.abs(y - x @ w) <= near)


def with_stored(q, **arrays):
    leaves = jtu.tree_leaves(q.stored | jtu.tree_map(jnp.asarray, arrays))
    return jtu.tree_unflatten(jtu.tree_structure(q), leaves)


# Also those that `quantize` does not write; among those of `fp8` are NaNs.
@every
def test_every_code(name):
    q = weight(512, 32, kinds[name])
    codes, rng = np.array(q.stored["codes"]), np.random.default_rng(0)
    # (Of 16 rows, all are numbers.)
    few = np.arange(0x7F).astype(np.uint8)
    some = rng.choice(few, codes.shape) | rng.choice([0, 128], codes.shape)
    every = rng.integers(0, 256, codes.shape)
    found = np.where(np.arange(32)[:, None] < 16, some, every).astype(np.uint8)
    q = with_stored(q, codes=found.view(codes.dtype))
    x = jnp.asarray(normal(3, 512, seed=1), jnp.bfloat16)
    y, w = np.asarray(product(x, q)), np.asarray(q.dequantize(), np.float64)
    x = np.asarray(x, np.float64)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x @ w))
    assert np.isnan(y).any() == name.startswith("fp8")
    bound = min(_product.error(problem_of(x, q)), 4e-3 if "nf4" in name else 1e-6)
    assert np.nanmax(np.abs(y - x @ w) / (np.abs(x) @ np.abs(w))) < bound


# What is not finite comes out as of the decoded weight; but a block whose scale is
# infinite, and whose numbers have one sign, is NaN and not infinite, and so may
# be the product of an infinite input with blocks that have minima.
@every
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
def test_not_finite(name, dtype):
    q = weight(200, 24, kinds[name])
    bits = np.array(q.stored["scale"])
    wild = np.array([np.nan, np.inf, -np.inf, 0], q.format.scale_dtype)
    if bits.shape[0] > 1:
        bits[:4, -1] = wild.view(bits.dtype)
    q = with_stored(q, scale=bits)
    x = jnp.asarray(inputs(200, 12), dtype)
    y, w = product(x, q), np.asarray(q.dequantize(), np.float64)
    exact = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
        exact, size = exact @ w, np.abs(exact) @ np.abs(w)
    exact[np.isinf(w).any(axis=0) & np.isinf(exact)] = np.nan
    if q.format.offset == "minimum":
        exact[np.isinf(exact) & np.isnan(y)] = np.nan
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    np.testing.assert_array_equal(y[np.isinf(exact)], exact[np.isinf(exact)])
    finite = np.isfinite(exact)
    assert finite.any() and (np.isinf(exact).any() or q.format.offset == "minimum")
    assert np.all(np.abs(y - exact)[finite] <= 4e-3 * size[finite])


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
