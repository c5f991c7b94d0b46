import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

import eqquant as eqq
from eqquant._report import _formats, format_table, FormatTable, read_losses
from eqquant.demo import _comparison, _files, _table


@pytest.fixture(scope="module")
def table():
    """Of few formats, and the one with the longest name."""
    longest = max(_formats._formats, key=lambda format: len(str(format)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_formats, "_formats", (eqq.Int8(), eqq.Binary(), longest))
        return format_table()


def _printed(table, width):
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def _with_losses(table):
    losses = {"Int8()": 0.00012, "Binary()": 12.5}
    rows = [dataclasses.replace(r, loss=losses.get(r.format)) for r in table.rows]
    return FormatTable(rows)


# The names are what one writes.
@pytest.mark.parametrize("format", _formats._formats)
def test_names(format):
    assert eval(str(format), dict(vars(eqq.formats))) == format


@pytest.mark.thorough
def test_numbers():
    table = format_table()
    found = {row.format: row for row in table.rows}
    assert list(found) == list(map(str, _formats._formats))
    bits = {name: row.bits_per_weight for name, row in found.items()}
    assert bits["NF4()"] == 4 + 32 / 64
    assert bits["Nested()"] == 4 + 8 / 64 + 32 / 4096
    assert bits["Int8()"] == 8 + 32 / 4096
    assert bits["Int4(symmetric=False)"] == 4 + (32 + 8) / 64
    assert bits["Ternary()"] == (820 * 8 + 32) / 4096
    assert bits['Ternary(scale="tensor")'] == (820 * 8 + 32 / 4096) / 4096
    assert bits["Binary(128)"] == 1 + 32 / 128
    # As theory has it: of the optimal two levels, and of uniform steps in +-4.1 sigma.
    assert found["Binary()"].normal == pytest.approx(4.40, abs=0.02)
    assert found["Int8()"].normal == pytest.approx(41.3, abs=0.2)
    assert found["NF4()"].normal == pytest.approx(20.7, abs=0.1)
    # Heavy tails take from the resolution of all, and NF4 suits them better than Int4.
    # (Rotated, they are nearly normal.)
    for name, row in found.items():
        if name.startswith("Rotated"):
            assert row.student_t == pytest.approx(row.normal, abs=0.3)
        else:
            assert row.student_t < row.normal
    gap = {name: row.student_t for name, row in found.items()}
    assert gap["NF4()"] > gap["Int4()"] + 2
    assert all(row.loss is None for row in table.rows)


def test_sample(table):
    # An independent computation, of the one format that is two lines of it.
    w = np.random.default_rng(0).standard_normal((256, 4096), np.float32)
    w = w.astype(np.float64)
    binary = np.sign(w) * np.mean(np.abs(w), axis=1, keepdims=True)
    expected = 10 * np.log10(np.sum(w**2) / np.sum((w - binary) ** 2))
    (row,) = [row for row in table.rows if row.format == "Binary()"]
    assert row.normal == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("losses", [False, True])
def test_looks(table, width, losses):
    table = _with_losses(table) if losses else table
    lines = _printed(table, width)
    assert all(len(line) <= width for line in lines)
    for row in table.rows:
        (line,) = [line for line in lines if line.startswith(f"{row.format} ")]
        assert f"{row.bits_per_weight:.2f}" in line
        assert f"{row.student_t:.1f} dB" in line
    assert losses == any("change of" in line for line in lines[:2])
    assert losses == any(line.rstrip().endswith("+0.0001") for line in lines)
    assert "Int8()" in repr(table)


def test_markdown(table):
    header, rule, *lines = _with_losses(table).markdown().splitlines()
    assert header.split(" | ")[1:] == [
        "bits per weight",
        "SQNR, normal",
        "SQNR, Student's t",
        "change of loss, nats |",
    ]
    assert set(rule) == set("| -:")
    assert len({len(line) for line in [header, rule, *lines]}) == 1
    assert lines[0].startswith("| `Int8()` ")
    assert lines[0].endswith(" +0.0001 |")
    assert len(table.markdown().splitlines()[0].split(" | ")) == 4


def test_losses_are_those_of_the_demo(tmp_path):
    shown = {*_comparison.nearest, *_comparison.trained_with}
    assert shown - {*_comparison.calibrated} <= set(_formats._formats)
    # However a format is spelled there.
    path = tmp_path / "table.csv"
    row = _table.Row("NF4(64)", "nearest", 4.5, 1.0, 1.5, change=0.25)
    rows = [row, row._replace(method="GPTQ", change=0.125)]
    _files.write_csv(path, row._fields, rows)
    assert read_losses(path) == {"NF4()": 0.25}


def test_files_of_another_kind(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("name,change\na,1\n")
    with pytest.raises(ValueError, match="`format` and `change`. Got columns name"):
        read_losses(path)
    path.write_text("")
    with pytest.raises(ValueError, match="columns `format` and `change`"):
        read_losses(path)
    path.write_text("format,change\na,b\n")
    with pytest.raises(ValueError, match="'b'"):
        read_losses(path)
    path.write_text("format,change\na\n")
    with pytest.raises(ValueError, match="''"):
        read_losses(path)
