import dataclasses
import io
import math

import equinox as eqx
import pytest
from rich.console import Console

import eqquant as eqq
from eqquant._report import Report, report, Row
from eqquant._report._text import short_bytes

from ..helpers import normal


def _printed(renderable, width):
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def _row(path, **fields):
    row = Row(
        path=path,
        shape=(64, 64),
        dtype="float32",
        format="NF4()",
        activation=None,
        axis=-1,
        bits_per_weight=4.5,
        before=16384,
        after=2304,
        sqnr=20.0,
        reason="",
        hint="",
        tied_to=None,
    )
    return dataclasses.replace(row, **fields)


def _dense(path, **fields):
    fields = dict(reason="a vector", format=None, sqnr=math.inf) | fields
    return _row(path, after=16384, axis=None, **fields)


def test_looks():
    w = normal(64, 64)
    q = eqq.quantize(w, axis=-1)
    model = {"a": {"weight": q, "bias": w[0]}, "b": {"weight": q}}
    dense = {"a": {"weight": w, "bias": w[0]}, "b": {"weight": w}}
    assert _printed(report(model, dense), 80).splitlines() == [
        "Quantized  array       format  axis  bits   before    after     SQNR",
        "────────────────────────────────────────────────────────────────────",
        "a.weight   f32[64,64]  NF4()     -1  4.50  16.4 kB  2.30 kB  20.7 dB",
        "b.weight   f32[64,64]  tied to a.weight",
        "",
        "Left dense",
        "──────────────────────────",
        "  a vector",
        "    a.bias  f32[64]  256 B",
        "",
        "2 arrays, 1 quantized: 16.6 kB → 2.56 kB, 6.5x smaller, 4.92 bits/weight",
    ]


@pytest.mark.parametrize("width", [80, 160])
def test_paths_are_whole(width):
    paths = [f"layers.{i}.attention.{'very_' * 7}long_name.weight" for i in range(3)]
    rows = [_row(path) for path in paths]
    rows += [_dense(f"{path}.bias", hint="Wait " * 40) for path in paths]
    lines = _printed(Report(rows), width).splitlines()
    assert all(len(line) <= width for line in lines)
    for path in paths:
        assert sum(f"{path} " in f"{line} " for line in lines) == 1
        assert sum(f"{path}.bias" in line for line in lines) == 1
    beside = [line for line in lines if line.startswith("layers.0.") and "NF4" in line]
    assert len(beside) == (width == 160)


def test_many_alike():
    many = [
        _row(f"layers.{i}.mlp.2.weight", sqnr=20.0 + (i - 5) ** 2) for i in range(12)
    ]
    few = [_row(f"heads.{i}.weight") for i in range(8)]
    other = [_row("layers.12.mlp.2.weight", shape=(64, 128))]
    lines = _printed(Report(many + few + other), 160).splitlines()
    (line,) = [line for line in lines if "layers.*" in line]
    assert line.split()[:3] == ["layers.*.mlp.2.weight", "12", "×"]
    assert line.split()[-6:] == ["197", "kB", "27.6", "kB", "20.0", "dB"]
    assert sum(line.startswith("heads.") for line in lines) == 8
    assert any(line.startswith("layers.12.mlp.2.weight") for line in lines)


def test_many_tied():
    rows = [_row("layers.0.weight")]
    rows += [
        _row(f"layers.{i}.weight", tied_to="layers.0.weight", before=0, after=0)
        for i in range(1, 12)
    ]
    text = _printed(Report(rows), 80)
    assert "layers.*.weight  11 × f32[64,64]  tied to layers.0.weight" in text
    assert "1 array, 1 quantized: 16.4 kB → 2.30 kB, 7.11x smaller" in text


def test_reasons_are_said_once():
    rows = [
        _dense(f"a.{i}.table", hint=f'Rules([("a.{i}.table", ...)])') for i in range(3)
    ]
    rows += [_dense("b", hint='Rules([("b", ...)])', reason="small", shape=(3,))]
    rows += [_dense("c", reason="changed", sqnr=12.34, tied_to="a")]
    rows += [_dense("d", reason="changed", sqnr=12.34)]
    lines = _printed(Report(rows), 80).splitlines()
    assert "  a vector → Rules([(PATH, ...)])" in lines
    assert '  small → Rules([("b", ...)])' in lines
    assert "    c          f32[64,64]  tied to a" in lines
    assert "    d          f32[64,64]  16.4 kB  12.3 dB" in lines
    # The reason that weighs most comes first.
    assert lines[2] == "  a vector → Rules([(PATH, ...)])"


def test_activation():
    q = eqq.quantize(normal(32, 32), "int8", activation="int8")
    header, _, line, *_ = _printed(report(q), 80).splitlines()
    assert header.split() == (
        "Quantized array format activation axis bits before after".split()
    )
    assert line.split()[:4] == ["(root)", "f32[32,32]", "Int8()", "Int8()"]


def test_larger_and_empty():
    assert "2x larger" in _printed(Report([_row("a", before=10, after=20)]), 80)
    # (A quantized array of no numbers may have scales.)
    assert "0 B → 4 B\n" in _printed(Report([_row("a", before=0, after=4)]), 80)
    assert _printed(report({"a": 1.0}), 80) == "0 arrays, 0 quantized: 0 B → 0 B\n"


def test_markup_is_no_markup():
    rows = [_row("[bold]a[/bold]"), _dense("[red]", reason="[blue]x[/blue]")]
    text = _printed(Report(rows), 80)
    assert "[bold]a[/bold]" in text and "[red]" in text and "[blue]x[/blue]" in text


def test_repr_is_as_wide_as_the_terminal(monkeypatch):
    found = Report([_row("x" * 60)])
    monkeypatch.setenv("COLUMNS", "80")
    assert len(repr(found).splitlines()) == 7
    monkeypatch.setenv("COLUMNS", "160")
    assert len(repr(found).splitlines()) == 5
    assert repr(found) == str(found)
    assert not any(line != line.rstrip() for line in repr(found).splitlines())


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (2_300_000, "2.30 MB"),
        (7_240_000_000, "7.24 GB"),
        (1_500_000_000_000, "1.50 TB"),
        (1_500_000_000_000_000, "1500.00 TB"),
    ],
)
def test_short_bytes(nbytes, text):
    assert short_bytes(nbytes) == text


def test_dense_arrays_of_a_few_layers_are_merged():
    layers = [eqx.nn.LayerNorm(64) for _ in range(6)]
    model = {"norm": eqx.nn.LayerNorm(64), "layers": layers}
    text = _printed(report(model), 80)
    assert "layers.*.weight  6 × f32[64]" in text
    assert "layers.*.bias    6 × f32[64]" in text
    assert "    norm.weight      f32[64]" in text and "layers.0" not in text
    few = _printed(report(layers[:4]), 80)
    assert all(f"    {i}.{x} " in few for i in range(4) for x in ("weight", "bias"))
