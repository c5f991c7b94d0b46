import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from eqquant._cli import _differences, main
from eqquant._cli._differences import difference

from .interop import files


def _line(capsys, tmp_path, a, b):
    for name, x in (("a", a), ("b", b)):
        files.save(tmp_path / f"{name}.safetensors", {"x": x})
    argv = ["compare", *(str(tmp_path / f"{x}.safetensors") for x in "ab")]
    assert main(argv) == 0
    _, line = capsys.readouterr().out.splitlines()
    return line.split()


@pytest.mark.parametrize(
    "dtype, a, b, largest",
    [
        (np.int32, 2**24, 2**24 + 1, "1"),
        (np.int64, 2**53, 2**53 + 1, "1"),
        (np.int64, -(2**63), 2**63 - 1, "1.84e+19"),
        (np.float32, 1.0, np.nextafter(np.float32(1), np.float32(2)), "1.19e-07"),
    ],
)
def test_what_differs_is_not_exact(dtype, a, b, largest, tmp_path, capsys):
    a, b = (np.asarray([x, 0], dtype) for x in (a, b))
    line = _line(capsys, tmp_path, a, b)
    assert line[1:3] != ["exact", "0"] and line[2:4] == ["dB", largest]
    assert _line(capsys, tmp_path, a, a)[1:3] == ["exact", "0"]


def test_doubles():
    x = np.array([1.0, 1e-300])
    found = difference(x, x + [1e-12, 0])
    assert not found.is_exact and math.isclose(found.largest, 1e-12, rel_tol=1e-3)
    assert math.isclose(found.sqnr, 240, rel_tol=1e-5)
    found = difference(x, x * [1, 2])
    assert not found.is_exact and math.isclose(found.sqnr, 6000)
    found = difference(x * 1e300, x * 1e300 + [1e290, 0])
    assert math.isclose(found.sqnr, 200, rel_tol=1e-5)


def test_not_finite(tmp_path, capsys):
    x = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    assert _line(capsys, tmp_path, x, x)[1:3] == ["exact", "0"]
    assert _line(capsys, tmp_path, x, x.astype(np.float16))[1:3] == ["exact", "0"]
    # What is not finite in both tells nothing of the error.
    found = difference(x, x + np.array([0, 0, 0, 0.1], np.float32))
    assert not found.is_exact and math.isclose(found.sqnr, 20, rel_tol=1e-5)
    assert math.isnan(difference(x, np.ones(4, np.float32)).largest)
    assert difference(x[3:], x[1:2]).largest == math.inf


_dtypes = [
    *(np.bool_, np.uint8, np.int8, np.int32, np.uint32, np.int64, np.uint64),
    *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]


# The oracle computes with fractions, some numbers at a time.
def test_all_dtypes(monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(_differences, "_numbers", 5)
    for dtype in _dtypes:
        for other in _dtypes:
            x = rng.integers(0, 2, 12).astype(dtype)
            x[3:6] = rng.integers(0, 120, 3).astype(dtype)
            y = x.astype(other)
            y[7] = np.asarray(rng.integers(0, 3)).astype(other)
            a, b = ([Fraction(_number(v)) for v in z] for z in (x, y))
            found = difference(x, y)
            assert found.is_exact == (a == b)
            errors = [abs(v - w) for v, w in zip(a, b)]
            assert math.isclose(found.largest, max(errors))
            noise, signal = (float(sum(v**2 for v in z)) for z in (errors, a))
            if noise > 0 and signal > 0:
                ratio = 10 * math.log10(signal / noise)
                assert math.isclose(found.sqnr, ratio, rel_tol=1e-9, abs_tol=1e-9)


def _number(x):
    return int(x) if x.dtype.kind in "bui" else float(x)


def test_empty():
    x = np.zeros((0, 3), np.float32)
    assert difference(x, x).is_exact
