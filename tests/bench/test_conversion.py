import io

import numpy as np
import pytest
from rich.console import Console

from eqquant import bench
from eqquant._cli import main
from eqquant.bench import _conversion


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
    monkeypatch.setattr(_conversion, "measure_conversions", lambda show: measured)
    file = io.StringIO()
    assert bench.run_conversions(console=Console(file=file, width=100)) == measured
    text = file.getvalue()
    rate = measured[0].nbytes / np.median(measured[0].quantize.seconds) / 1e6
    assert "Int8()" in text and f"{rate:.0f}" in text


def test_command(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run_conversions", lambda: asked.append(True))
    assert main(["bench", "--quantize"]) == 0
    assert asked == [True]
