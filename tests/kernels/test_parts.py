import dataclasses

import jax
import jax.numpy as jnp
import pytest

import eqquant as eqq
from eqquant.kernels.gpu import _parts
from eqquant.kernels.gpu._decoded import decoded

from ..helpers import error, formats, normal
from .test_fused import every_layout, problem_of


# Kernels that copy stored arrays run on some rows of a weight at a time. (That XLA
# copies no more is tested where it compiles for GPUs.)
@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "name, n, parts",
    (("nf4", 256, {64}), ("nvfp4", 200, {104, 96}), ("nf4", 90, {90})),
)
def test_parts(monkeypatch, name, n, parts):
    monkeypatch.setattr(_parts, "_most_numbers", 10000)
    monkeypatch.setattr(_parts, "_tile", 8)
    found = set()

    @_parts.in_parts
    def product(x, stored, problem):
        found.add(problem.n)
        shape = problem.layout.shape(stored)
        assert shape == (problem.n, problem.k)
        return decoded(x, stored, problem)

    q = eqq.quantize(normal(96, n), formats[name])
    for q in every_layout(q):
        x, problem = normal(3, q.shape[0], seed=1), problem_of(normal(3, q.shape[0]), q)
        y = jax.jit(lambda x, s, problem=problem: product(x, s, problem))(x, q.stored)
        assert error(y, x, q.dequantize()) < 1e-3
    assert found == parts


def test_weights_side_by_side(monkeypatch):
    # Parts of all weights are copied at the same time.
    monkeypatch.setattr(_parts, "_most_numbers", 10000)
    monkeypatch.setattr(_parts, "_tile", 8)
    problem = problem_of(jnp.ones((1, 64)), eqq.quantize(normal(64, 192), "nf4"))
    assert _parts._rows(problem) == 96  # (of at most 152)
    assert _parts._rows(dataclasses.replace(problem, stack=4)) == 32  # (of 39)
    # (At least the rows of one tile.)
    assert _parts._rows(dataclasses.replace(problem, stack=400)) == 8
