import functools as ft
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant import bench
from eqquant.bench._candidate import xla

from ..helpers import error


pytestmark = pytest.mark.optimized

_k, _n = 64, 96
_dense = ["float32", "bfloat16"]
_quantized = ["int8:int8", "nf4", "rsrbinary"]
_names = _dense + _quantized
_rows_and_names = [
    pytest.param(m, name, marks=() if m == 4 else pytest.mark.thorough)
    for m in (1, 4)
    for name in _names
]


@ft.cache
def _measured(m):
    found = bench.measure(
        [(_k, _n)], [m], _quantized, budget=0, min_rounds=3, cycle=1 << 16, seed=5
    )
    found = [row for row in found if not row.name.endswith(xla)]
    return dict(zip(_names, found, strict=True))


def _weight(name):
    w = np.random.default_rng(5).standard_normal((_k, _n), np.float32)
    if name in _dense:
        return jnp.asarray(w, name)
    if name == "rsrbinary":
        w = np.where(w > 0.5, np.float32(1), np.float32(0))
    format, _, activation = name.partition(":")
    return eqq.quantize(w, format, activation=activation or None)


def _rows(m):
    return np.random.default_rng(6).standard_normal((m, _k), np.float32)


@pytest.mark.parametrize("m, name", _rows_and_names)
def test_what_is_measured(m, name):
    row = _measured(m)[name]
    assert (row.rows, row.shape, row.failure) == (m, (_k, _n), None)
    w = _weight(name)
    if name in _dense:
        assert row.name == name
        assert row.kernel is None
        assert row.bits_per_weight == 8 * w.dtype.itemsize
    else:
        assert row.name.lower().startswith(name.partition(":")[0])
        assert row.kernel == eqq.explain(jnp.asarray(_rows(m)), w).kernel
        assert row.bits_per_weight == w.bits_per_weight
    assert row.compile_seconds > 0


@pytest.mark.parametrize("m, name", _rows_and_names)
def test_errors_and_temporaries(m, name):
    row = _measured(m)[name]
    w = _weight(name)
    stored = w.dequantize() if eqq.is_quantized(w) else w
    x = _rows(m)
    with_outlier = x.copy()
    with_outlier[np.arange(m), np.abs(x).argmax(axis=1)] = 300
    dtype = w.dtype if name in _dense else jnp.float32
    product = jax.jit(operator.matmul).lower(jnp.asarray(x, dtype), w).compile()
    for found, rows in ((row.error, x), (row.outlier_error, with_outlier)):
        expected = error(product(jnp.asarray(rows, dtype), w), rows, stored)
        assert found == pytest.approx(expected, rel=1e-6)
        assert found > 0
    assert row.temporary_bytes == product.memory_analysis().temp_size_in_bytes


def test_times():
    for row in _measured(4).values():
        times = row.times
        assert len(times.seconds) == len(times.baseline) == 3
        assert times.baseline == _measured(4)["float32"].times.seconds
        assert min(times.seconds) > 0
        assert times.p10 <= times.median <= times.p90
        assert times.median == sorted(times.seconds)[1]
        assert times.ratio == sorted(times.baseline)[1] / times.median
        tenth = np.percentile(times.baseline, 10) / np.percentile(times.seconds, 10)
        assert times.ratio_p10 == pytest.approx(tenth)
    assert _measured(4)["float32"].times.ratio == 1


# Products that do not fit into memory together are timed in groups.
def test_groups(monkeypatch):
    monkeypatch.setattr("eqquant.bench._measure.physical_memory", lambda: 1)
    found = bench.measure(
        [(16, 16), (16, 32)], [2, 1], ["nf4"], budget=0, min_rounds=2, cycle=0
    )
    found = [row for row in found if not row.name.endswith(xla)]
    names = ["float32", "bfloat16", "NF4()"]
    assert [(row.shape, row.rows, row.name) for row in found] == [
        ((16, n), m, name) for n in (16, 32) for m in (2, 1) for name in names
    ]
    baselines = {row.times.baseline for row in found[:3]}
    assert len(baselines) == 2  # bfloat16 is next to the float32 that is kept.


def test_default_formats():
    names = [str(quantization) for quantization in bench.default_formats()]
    assert names[:4] == ["Int8()", "Int8(), x Int8()", "NF4()", "Int4()"]
    assert len(set(names)) == len(names)


@pytest.mark.thorough
def test_progress():
    seen = []
    bench.measure(
        [(16, 16), (16, 32)],
        [1],
        [bench.Quantization(eqq.Int8(), eqq.Int8())],
        budget=0.01,
        min_rounds=2,
        cycle=0,
        show=lambda done, doing: seen.append((done, doing)),
    )
    parts = [done for done, _ in seen]
    assert parts == sorted(parts)
    assert parts[0] > 0
    assert parts[-1] == pytest.approx(1)
    assert "16x32, 1 row, compiling Int8(), x Int8()" in [doing for _, doing in seen]


@pytest.mark.parametrize(
    "kwargs, match",
    [
        (dict(shapes=[(0, 16)]), r"`shapes` .* Got \(0, 16\)"),
        (dict(rows=[1, 0]), r"`rows` .* Got \[1, 0\]"),
        (dict(formats=["int9"]), "int9"),
        (dict(formats=["int8:int9"]), "int9"),
        (dict(formats=["int8:rsrbinary"]), "0 and 1 only"),
    ],
)
def test_bad_input(kwargs, match):
    with pytest.raises(ValueError, match=match):
        bench.measure(**dict(shapes=[(16, 16)]) | kwargs)


def test_rows_that_share_a_scale():
    name = "int8:ternary"
    bench.as_quantization(name)
    shared = bench.Quantization(eqq.Int8(), eqq.Ternary(scale="tensor"))
    with pytest.raises(ValueError, match="row"):
        bench.measure([(16, 16)], [1], [shared])
