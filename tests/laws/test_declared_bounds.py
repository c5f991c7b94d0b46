import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import all_formats, formats, grids, normal
from ..kernels.every import every_product, kernels
from .test_not_finite import traced


# The error of every kernel is within what it declares, whatever the inputs are. (Next
# to numbers below the smallest normal one, which may count as zeros.)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Kernels that round do small weights, too."""
    monkeypatch.setattr("eqquant.kernels.cpu._tiles._rounding_size", 0)


# (Of the shapes in `test_not_finite`, so that the products are compiled once.)
def weight(format, k=141, n=24):
    # (Zeros where there are outliers.)
    w = np.array(normal(k, n, seed=5))
    w[::50], w[:, ::13] = 0, 0
    return traced(jnp.asarray(w), format)


def hostile(k, m):
    """Rows of all kinds."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((m, k))
    x[1::8, :: (50 if k == 141 else 13)] *= 1e6
    for row in x[2::8]:
        row[rng.integers(0, k, max(1, k // 100))] *= 1e6
    x[3::16] = np.abs(x[3::16])
    x[11::16] = rng.exponential(size=x[11::16].shape) * np.sign(x[11::16])
    x[4::16] *= 10.0 ** rng.uniform(-12, 12, x[4::16].shape)
    x[12::16] *= rng.random(x[12::16].shape) < 0.1
    x[5::16], x[13::16] = 0, 0
    x[13::16, 7] = 3.0
    x[6::16] *= 1e-30
    x[14::16] *= 1e30
    x[7::16] *= 1e-39
    x[15::16] = np.exp2(6 * np.arange(k) / k) * 1.999
    return x.astype(np.float32)


def check_both(q, m, dtype=jnp.float32):
    w = np.asarray(q.dequantize(), np.float64)
    check(q, w, m, dtype)
    check(q.T, w.T, m, dtype)


def check(q, w, m, dtype=jnp.float32):
    k = q.shape[0]
    x = jnp.asarray(hostile(k, m), dtype)
    exact = np.asarray(x, np.float64)
    near = np.abs(exact) @ np.abs(w)
    tiny = 256 * k * float(jnp.finfo(jnp.float32).tiny) * (1 + np.max(np.abs(w)))
    tiny += float(jnp.finfo(dtype).smallest_normal)
    eps = float(jnp.finfo(dtype).eps)
    found, problem = every_product(x, q), eqq.explain(x, q).problem
    for kernel in kernels(x, q):
        y = np.asarray(found[kernel.name], np.float64)
        bound = kernel.bound(problem) * near + eps * np.abs(exact @ w) + tiny
        over = np.max(np.abs(y - exact @ w) - bound)
        assert over <= 0, (kernel.name, over)
    return {kernel.name for kernel in kernels(x, q)}


@pytest.mark.examples(2)
@all_formats
def test_of_few_rows(format):
    check_both(weight(format), 2)


# Those kernels that round are for many rows.
@pytest.mark.examples(2)
@grids
def test_of_many_rows(format):
    check_both(weight(format), 33)


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ("nf4", "int8", "int4-affine"))
def test_of_narrow_inputs(name):
    q = weight(formats[name])
    check(q, np.asarray(q.dequantize(), np.float64), 33, jnp.bfloat16)


# Each weight alone, so that no other covers its error: of the smallest, the code times
# the scale is nearly the opposite of the minimum. (Optimized, XLA rounds the sum once.)
@pytest.mark.examples(1)
@pytest.mark.optimized
@pytest.mark.parametrize("m", (2, 48))
@pytest.mark.parametrize("bits", (4, 7))
def test_of_one_weight(bits, m):
    q = eqq.quantize(normal(240, 80), eqq.Int(bits, 48, "minimum"))
    w = np.asarray(jax.jit(lambda q: q.dequantize())(q), np.float64)
    np.testing.assert_array_equal(q.dequantize(), w)
    for start in range(0, 240, m):
        x = jnp.eye(m, 240, start)
        found = every_product(x, q)
        for kernel in kernels(x, q):
            y, wanted = np.asarray(found[kernel.name]), w[start : start + m]
            assert np.all(np.abs(y - wanted) <= kernel.error * np.abs(wanted))


@pytest.mark.parametrize("format", (eqq.RSRBinary(8), eqq.RSRTernary(5)), ids=str)
def test_of_exact_formats(format):
    w = normal(141, 24)
    q = eqq.quantize(jnp.where(w < 0, float(format.domain[0]), jnp.sign(w)), format)
    check_both(q, 33)


# All weights and all inputs halfway between two numbers of bfloat16, so that each
# product is off by two roundings, in the same direction.
def test_two_roundings():
    w = np.full((64, 24), 1.0, np.float32)
    q = eqq.quantize(jnp.asarray(w), eqq.NF4(64))
    scale = np.full((1, 24), 1 + 2.0**-8 - 2.0**-20, np.float32)
    q = eqq.QuantizedArray(
        q.stored | {"scale": jnp.asarray(scale.view(np.uint32))},
        *(getattr(q, name) for name in q.__dataclass_fields__ if name != "stored"),
    )
    x = jnp.full((48, 64), scale[0, 0])
    found = every_product(x, q)
    expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64)
    for kernel in kernels(x, q):
        error = np.max(np.abs(found[kernel.name] - expected) / expected)
        assert error <= kernel.error


# Terms that are all the same, of which there are so many that roundings in one
# direction add up: along the blocks and across them, and of rows in panels.
@pytest.mark.examples(1)
@grids
@pytest.mark.parametrize("m", (1, 3, 5, 17))
def test_of_long_sums(m, format):
    along = eqq.quantize(jnp.full((_long, 16), 0.7), format, axis=0)
    across = eqq.quantize(jnp.full((_long, 16), 0.7), format, axis=1)
    for q in (along, eqq.tree_prepack(along), across):
        check_long(q, m)


_long = 2**17 + 80


def check_long(q, m):
    k = q.shape[0]
    x = jnp.full((m, k), 1.3)
    w = np.asarray(q.dequantize(), np.float64)
    exact = np.float64(np.float32(1.3)) * np.sum(w, axis=0)
    size = np.float64(np.float32(1.3)) * np.sum(np.abs(w), axis=0)
    found, problem = every_product(x, q), eqq.explain(x, q).problem
    for kernel in kernels(x, q):
        error = np.max(np.abs(np.asarray(found[kernel.name]) - exact) / size)
        assert error <= kernel.bound(problem), (kernel.name, error)
