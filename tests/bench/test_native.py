import os

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant import bench
from eqquant.bench import _entries
from eqquant.bench._candidate import (
    by_prepacking,
    by_xla,
    Candidate,
    quantized,
    without_native,
)
from eqquant.kernels.native import _kernels, _library as library, _weight


@pytest.fixture
def called(monkeypatch):
    """The native functions that programs were compiled to call."""
    monkeypatch.setenv("EQQUANT_NATIVE", "1")
    if (reason := library.missing()) is not None:
        pytest.skip(reason)
    names = []

    def recorded(call):
        def record(name, *args):
            names.append(name)
            return call(name, *args)

        return record

    for module in (_kernels, _weight):
        monkeypatch.setattr(module, "call", recorded(module.call))
    return names


@pytest.mark.parametrize("before", (None, "0", "require"))
def test_the_environment_is_as_before(monkeypatch, before):
    monkeypatch.delenv("EQQUANT_NATIVE", raising=False)
    if before is not None:
        monkeypatch.setenv("EQQUANT_NATIVE", before)
    with pytest.raises(ZeroDivisionError):
        with without_native():
            assert "EQQUANT_NATIVE=0" in library.missing()
            1 / 0
    assert os.environ.get("EQQUANT_NATIVE") == before


@pytest.mark.parametrize("name", ("int8", "int8:int8", "nf4", "rsrbinary"))
def test_what_is_compiled(called, name):
    w = np.random.default_rng(0).standard_normal((64, 32), np.float32)
    candidate = quantized(bench.as_quantization(name), w)
    other = by_xla(candidate)
    assert other.weight is candidate.weight
    x = jnp.ones((1, 64))
    if not candidate.kernel(x).startswith("native"):
        assert name not in ("int8", "nf4")
        pytest.skip("the library is not faster on this machine")
    assert not other.kernel(x).startswith("native")
    # In either order: nothing that was compiled before is taken.
    for one in (candidate, other, candidate):
        called.clear()
        one.compile(one.fn, x, one.weight)
        assert len(called) == (one is candidate)


def _seen(*_):
    return os.environ.get("EQQUANT_NATIVE", "1")


# With a kernel that depends on the library for one row, on machines without one, too.
def test_rows_without_the_library(monkeypatch):
    monkeypatch.delenv("EQQUANT_NATIVE", raising=False)
    compiled = []

    def compile(fn, x, weight):
        compiled.append((_seen(), x.shape[0]))
        return one.compile(fn, x, weight)

    def make(w):
        nonlocal one
        one = quantized(bench.as_quantization("int8"), w)
        kernel = lambda x: "a" if x.shape[0] > 1 or _seen() == "0" else "b"
        return Candidate(
            one.weight, one.nbytes, one.decoded, kernel=kernel, compile=compile
        )

    one = None
    entries = [_entries.Entry("first", make), _entries.Entry("second", make)]
    monkeypatch.setattr("eqquant.bench._measure.entries", lambda *args: entries)
    found = bench.measure([(32, 16)], [1, 2], [], budget=0, min_rounds=2, cycle=0)
    assert [(row.rows, row.name, row.kernel) for row in found] == [
        (1, "first", "b"),
        (1, "first, XLA", "a"),
        (1, "second", "b"),
        (1, "second, XLA", "a"),
        (2, "first", "a"),
        (2, "second", "a"),
    ]
    assert compiled == [("1", 1), ("0", 1)] * 2 + [("1", 2)] * 2
    for row in found:
        assert len(row.times.seconds) == 2
        assert row.bits_per_weight == found[0].bits_per_weight


@pytest.mark.thorough
def test_prepacked(called):
    w = np.random.default_rng(1).standard_normal((64, 128), np.float32)
    candidate = quantized(bench.as_quantization("nf4"), w)
    other = by_prepacking(candidate)
    changes = eqq.tree_prepack(candidate.weight).layout != candidate.weight.layout
    assert (other is not None) == changes
    names = ["float32", "bfloat16", "NF4()", "NF4(), XLA"]
    rows = bench.measure([w.shape], [2], ["nf4"], budget=0, min_rounds=1, cycle=1 << 14)
    names += ["NF4(), prepacked"] if changes else []
    assert [row.name for row in rows] == names
    if other is not None:
        assert other.weight.layout != candidate.weight.layout
        first, *_, last = rows[2 : len(names)]
        assert last.bits_per_weight == first.bits_per_weight
        assert last.error < 1e-5
        assert by_prepacking(other) is None
        size = bench.Size(
            vocabulary=64, width=64, hidden=64, depth=1, heads=2, positions=4
        )
        found = bench.measure_decoding(["nf4"], size=size, budget=0, min_rounds=1)
        assert [row.name for row in found] == ["float32", *names[2:]]
        assert found[-1].nbytes == found[1].nbytes
        assert found[-1].error < 1e-5


def test_other_libraries_are_not_prepacked():
    entry = _entries.entries([], peers=False)[0]
    assert by_prepacking(entry.make(np.ones((64, 64), np.float32))) is None


@pytest.mark.thorough
def test_decoding_without_the_library(called):
    size = bench.Size(vocabulary=32, width=32, hidden=32, depth=1, heads=2, positions=4)
    kwargs = dict(size=size, budget=0, min_rounds=1)
    rows = bench.measure_decoding(["int8"], **kwargs)
    assert [row.name for row in rows] == ["float32", "Int8()", "Int8(), XLA"]
    assert rows[1].nbytes == rows[2].nbytes
    assert rows[2].error < 1e-5
    # By one of the two.
    assert called
    called.clear()
    with without_native():
        rows = bench.measure_decoding(["int8"], **kwargs)
    assert [row.name for row in rows] == ["float32", "Int8()"]
    assert not called


def test_markers():
    times = bench.Times((1.0,), (1.0,))
    names = ("float32", "bfloat16", "Int8()", "Int8(), XLA", "NF4()", "NF4(), XLA")
    names += ("NF4(), prepacked",)
    rows = [
        bench.Measurement(name, 1, (16, 16), times, bits_per_weight=8.0)
        for name in names
    ]
    (axes,) = bench.figure(rows).axes
    colors, fills = zip(*[(a.get_color(), a.get_fillstyle()) for a in axes.lines[1:]])
    assert fills == ("full", "full", "full", "none", "full", "none", "full")
    assert colors[2] == colors[3] != colors[4] == colors[5] == colors[6]
    edges = [a.get_markeredgecolor() for a in axes.lines[1:]]
    assert edges[6] == "k" != edges[4]
