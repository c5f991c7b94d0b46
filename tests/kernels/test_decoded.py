import dataclasses

import jax
import jax.numpy as jnp
import pytest

import eqquant as eqq
import eqquant.kernels._table as table
from eqquant.kernels.gpu import _decoded

from ..helpers import all_formats, error, formats, many_at_once, normal
from ..laws.test_not_finite import check, inputs, weight
from .test_fused import every_layout, problem_of


# The product for many rows on any GPU is JAX alone, so that it runs on a CPU, too.


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small weights are decoded part by part, too."""
    monkeypatch.setattr(_decoded, "_few_bytes", 0)


def product(x, q, **changes):
    problem = dataclasses.replace(problem_of(x, q), **changes)
    (kernel,) = [k for k in table.supporting(problem) if k.name == "decoded"]
    run = jax.jit(lambda x, stored: kernel.fn(x, stored, problem))
    y = run(x, q.stored)
    assert y.dtype == x.dtype
    return y, kernel.bound(problem)


@pytest.mark.examples(2)
@all_formats
def test_every_format(format):
    if isinstance(format, eqq.Rotated):
        pytest.skip("its inputs are rotated outside of kernels")
    q = weight(format)
    for q in every_layout(q):
        x = inputs(q.shape[0], 10)
        y, bound = product(x, q)
        check(y, x, q.dequantize(), bound)


@pytest.mark.parametrize("format", (eqq.RSRBinary(), eqq.RSRTernary()), ids=str)
def test_exact_formats(format):
    w = jnp.asarray(normal(67, 35) > 0, jnp.float32)
    q, x = eqq.quantize(w, format), normal(9, 67)
    y, bound = product(x, q)
    assert error(y, x, w) < bound


# Parts that do not divide the rows, a row alone, and parts of several weights at once.
@pytest.mark.examples(4)
@pytest.mark.parametrize("m, k, n", ((12, 96, 70), (1, 33, 1), (64, 64, 16), (9, 1, 5)))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_sizes(m, k, n, dtype):
    q = eqq.quantize(normal(k, n), "nf4")
    for q in (q, q.T):
        x = normal(m, q.shape[0], seed=1).astype(dtype)
        y, bound = product(x, q)
        assert error(y, x, q.dequantize()) < bound + float(jnp.finfo(dtype).eps)


def test_stacked_weights():
    q, x = eqq.quantize(normal(3, 64, 40), "int4"), normal(3, 9, 64)
    problem = dataclasses.replace(problem_of(x[0], q[0]), stack=3)
    y = jax.vmap(lambda x, s: _decoded.decoded(x, s, problem))(x, q.stored)
    for each, row, w in zip(y, x, q.dequantize(), strict=True):
        assert error(each, row, w) < 8e-3


def test_highest_precision():
    q, x = eqq.quantize(normal(96, 40), "nf4"), normal(9, 96)
    y, bound = product(x, q, precision="highest")
    assert bound <= 1e-5 and error(y, x, q.dequantize()) < 1e-6


def test_how_much_is_decoded_at_once(monkeypatch):
    monkeypatch.undo()
    x = jnp.ones((9, 256))
    problem = problem_of(x, eqq.quantize(jnp.ones((256, 64)), "nf4"))
    of = lambda n, k: dataclasses.replace(problem, n=n, k=k)
    assert _decoded._rows(of(64, 256), 2) == 64
    assert _decoded._rows(of(4096, 4096), 2) == 256
    assert _decoded._rows(of(2**17, 4096), 2) == 1280
    assert _decoded._rows(of(2, 2**24), 2) == 1


# Where no other kernel is better: for any format, on any GPU.
@pytest.mark.examples(4)
@many_at_once
@pytest.mark.parametrize("platform", ("cuda", "rocm"))
@pytest.mark.parametrize("rows", (9, 64, 5000, None))
def test_choice(platform, rows, names):
    w = jnp.ones((64, 16))
    for format in (*[formats[name] for name in names], eqq.RSRTernary()):
        q = jax.eval_shape(lambda w: eqq.quantize(w, format), w)
        problem = problem_of(jnp.ones((1, 64)), q, platform)
        problem = dataclasses.replace(problem, rows=rows)
        found = table.choose(problem)
        if platform == "rocm":
            assert found.kernel.name == "decoded"
        assert found.kernel.name != "reference"
