import re

import jax
import numpy as np
import pytest

from . import compute


tiny = dict(width=32, depth=1, heads=2)


@pytest.fixture
def as_a_program():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.thorough
def test_losses(capsys, as_a_program):
    name = "fp8, one delayed scale, backward in e5m2"
    compute.losses(2, [0], [name], **tiny)
    first, row = capsys.readouterr().out.splitlines()
    value = float(re.fullmatch(r"float32 +(\d\.\d{4})", first)[1])
    # Hardly trained: about as many nats as bytes at random have.
    assert 3 < value < np.log(256) + 0.5
    found = re.fullmatch(r"(.+?) +([+-]\d\.\d{4})   mean ([+-]\d\.\d{4})", row)
    assert found[1] == name and found[2] == found[3]
    assert 0 < abs(float(found[2])) < 0.05


@pytest.mark.thorough
def test_speed(capsys, as_a_program):
    compute.speed(1, **tiny)
    first, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"0\.\d million parameters, 2048 tokens a step", first)
    row = re.compile(r"(.+?) +\d+\.\d\d s a step   (\d+\.\d\d) times as fast")
    found = [row.fullmatch(line).groups() for line in rows]
    assert found[0] == ("float32", "1.00") and len(found) == 3
