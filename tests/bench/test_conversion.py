import io

import numpy as np
import pytest
from rich.console import Console

from eqquant import bench
from eqquant._cli import main
from eqquant.bench import _conversion
from eqquant.formats import Int8, NF4, Q4_K


@pytest.fixture(scope="module")
def measured():
    return bench.measure_conversions(
        ["int8", "rsrbinary"], shape=(32, 64), budget=0, min_rounds=3
    )


def test_rows(measured):
    assert [row.name for row in measured] == ["Int8()", "RSRBinary()"]
    for row in measured:
        assert row.nbytes == 4 * 32 * 64
        assert len(row.quantize.seconds) == len(row.dequantize.seconds) == 3
        assert row.quantize.baseline == row.dequantize.baseline
        assert min(row.quantize.seconds + row.dequantize.seconds) > 0


def test_table(monkeypatch, measured):
    asked = []

    def measure(formats, *, axis, show):
        asked.append((formats, axis))
        return measured

    monkeypatch.setattr(_conversion, "measure_conversions", measure)
    file = io.StringIO()
    console = Console(file=file, width=200)
    assert bench.run_conversions(["int8"], axis=-1, console=console) == measured
    assert asked == [(["int8"], -1)]
    text = file.getvalue()
    rate = measured[0].nbytes / np.median(measured[0].quantize.seconds) / 1e6
    assert "along axis -1" in text and "Int8()" in text and f"{rate:.0f}" in text


def test_command(monkeypatch, capsys):
    asked = []
    record = lambda formats, *, axis: asked.append((formats, axis))
    monkeypatch.setattr(bench, "run_conversions", record)
    assert main(["bench", "--quantize"]) == 0
    assert main(["bench", "--quantize", "--formats", "q4_k", "--axis", "-1"]) == 0
    assert asked == [(None, -2), ([Q4_K()], -1)]
    every = [bench.as_quantization(name) for name in ("nf4", "int8", "int8:int8")]
    monkeypatch.setattr(bench, "all_formats", lambda: every)
    assert main(["bench", "--quantize", "--formats", "all"]) == 0
    assert asked[2] == ([NF4(), Int8()], -2)
    assert main(["bench", "--quantize", "--formats", "int9"]) == 2
    assert "int9" in capsys.readouterr().err and len(asked) == 3
