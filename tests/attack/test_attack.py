import pytest

import eqquant as eqq
from eqquant.formats import known_formats

from .case import Case
from .formats import families
from .run import kinds


# A few cases of each kind, with a seed of their own.
@pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.__name__)
def test_cases(kind):
    case = Case(1, 0)
    kind(case)
    assert case.failures == []
    assert case.met["check", ""] > 0


# Each format that this library has is drawn.
def test_every_format():
    own = {
        cls
        for cls in known_formats().values()
        if cls.__module__.startswith("eqquant.") and cls in vars(eqq).values()
    }
    assert own == set(families)


# A case draws the same again; and what goes wrong is told.
def test_cases_repeat():
    cases = [Case(3, 5) for _ in range(2)]
    assert len({case.rng.integers(2**62) for case in cases}) == 1
