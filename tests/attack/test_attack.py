import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import known_formats

from .case import Case
from .einsums import einsums
from .folders import folders
from .formats import families
from .long_sums import long_sums
from .oracle import product, unlike, wrong
from .products import products
from .programs import programs
from .round_trips import round_trips
from .sharding import sharding
from .training import adapters
from .writes import writes


def name(kind):
    return kind.__name__


# A case of each kind that does not take long to compile.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    (
        *(products, long_sums, programs, round_trips, sharding, adapters),
        *(folders, writes, einsums),
    ),
    ids=lambda k: k.__name__,
)
def test_cases(kind):
    case = Case(1, 0)
    kind(case)
    assert case.failures == []
    assert case.met["check", ""] > 0


# Each format of this library is drawn, but for those that are only read.
def test_every_format():
    own = {cls for cls in known_formats().values() if cls in vars(eqq.formats).values()}
    only_read = (eqq.formats.AbstractCodebook, eqq.formats.EXL3)
    own = {cls for cls in own if not issubclass(cls, only_read)}
    assert own == set(families)


def test_cases_repeat():
    first, second = Case(3, 5), Case(3, 5)
    assert first.integer(0, 2**62) == second.integer(0, 2**62)


# What is wrong is told from what is right.
def test_wrong():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 40)), rng.standard_normal((40, 5))
    x[1, 2], x[2, 4], w[2, :2], w[4, 2] = np.inf, np.nan, 0, -1
    with np.errstate(invalid="ignore"):
        y = x @ w
    expected = product(x, w)
    right = jnp.asarray(y, jnp.float32)
    assert wrong(right, expected, 1e-6) is None
    assert wrong(right.astype(jnp.bfloat16), expected, 0.0) is None
    off = right.at[0, 0].add(0.01)
    assert wrong(off, expected, 1e-6).startswith("off by")
    assert "should be NaN" in wrong(right.at[1, 0].set(0.0), expected, 1e-6)
    assert "should be finite" in wrong(right.at[0, 1].set(jnp.nan), expected, 1e-6)
    assert wrong(right.at[1, 0].set(jnp.inf), expected, 1e-6).endswith(unlike)
    assert "shape" in wrong(right[:2], expected, 1e-6)
    # Sums beyond what the dtype holds are infinite.
    large = product(x[:1] * 1e5, w)
    halves = jnp.asarray(large.value, jnp.float32).astype(jnp.float16)
    assert wrong(halves, large, 0.0) is None
    large = dataclasses.replace(large, value=large.value / 100)
    assert "should be finite" in wrong(halves, large, 0.0)
