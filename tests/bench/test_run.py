import csv
import dataclasses
import io
import math

import jax
import pytest
from rich.console import Console

from eqquant import bench
from eqquant.bench import _machine, _measure, _run
from eqquant.bench._candidate import Candidate
from eqquant.bench._peers import _peer
from eqquant.bench._table import tables


_size = bench.Size(vocabulary=32, width=32, hidden=32, depth=1, heads=2, positions=4)


@pytest.fixture
def tiny(monkeypatch):
    """The measurements, with three rounds of each."""
    measure, measure_decoding = bench.measure, bench.measure_decoding

    def few(*args, **kwargs):
        kwargs |= dict(budget=0, min_rounds=3, cycle=0)
        return measure(*args, **kwargs)

    def small(**kwargs):
        return measure_decoding(
            ["int8"], size=_size, budget=0, min_rounds=3, show=kwargs["show"]
        )

    monkeypatch.setattr(_run, "measure", few)
    monkeypatch.setattr(_run, "measure_decoding", small)


def _printed(width, *args, **kwargs):
    file = io.StringIO()
    console = Console(file=file, width=width)
    results = bench.run(*args, console=console, **kwargs)
    return results, file.getvalue()


def _read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_everything_is_shown_and_written(tiny, tmp_path):
    out = tmp_path / "new" / "folder"
    (products, decodings), text = _printed(
        100, [(64, 96)], [1], ["int8", "int8:int8"], out=out
    )
    lines = text.splitlines()
    assert f"JAX {jax.__version__}" in lines[0]
    memory = products[0].memory
    assert f"x[1, 64] @ w[64, 96]; memory: {memory / 1e9:.1f} GB/s" in text
    assert "Decoding, 0 million parameters" in text
    first_table = text.split("\n\n")[1].splitlines()
    for row in products:
        # With a space, as the name of one format may begin with that of another.
        (i,) = [i for i, a in enumerate(first_table) if a.startswith(f"{row.name} ")]
        cells = first_table[i].removeprefix(row.name).split()
        assert cells[0] == f"{row.times.ratio:.2f}"
        assert cells[1] == f"{row.times.ratio_p10:.2f}"
        assert cells[3] == f"{100 * row.bandwidth:.0f}"
        assert cells[4] == f"{row.bits_per_weight:.2f}"
        assert cells[6] == f"{row.error:.0e}"
        assert first_table[i + 1].split()[-1] == f"{row.outlier_error:.0e}"
    table = _read(out / "products.csv")
    assert len(table) == len(products) >= 4
    for found, row in zip(table, products):
        assert (found["format"], found["shape"], found["rows"]) == (
            row.name,
            "64x96",
            "1",
        )
        assert found["kernel"] == (row.kernel or "")
        assert float(found["ratio"]) == row.times.ratio
        assert float(found["median_seconds"]) == row.times.median
        assert float(found["bandwidth"]) == row.bandwidth
        assert float(found["memory_bytes_per_second"]) == memory
        assert float(found["error"]) == row.error
        assert float(found["outlier_error"]) == row.outlier_error
        assert int(found["rounds"]) == 3
    table = _read(out / "decoding.csv")
    assert [row["format"] for row in table][:2] == ["float32", "Int8()"]
    speeds = [float(row["tokens_per_second"]) for row in table]
    assert speeds == [row.tokens_per_second for row in decodings]
    assert (out / "products.png").read_bytes().startswith(b"\x89PNG")
    assert f"Wrote {out / 'products.csv'}, {out / 'decoding.csv'}, " in text


@pytest.mark.parametrize("m", (1, 16))
def test_tables_fit(m):
    times = bench.Times((0.0123, 0.0117, 0.0131), (0.0123,) * 3)
    names = ["float32", "Int8(), x Int8()", "Int8(), x Int8(), XLA"]
    kernels = [None, "native_integers", "bfloat16_tiles"]
    rows = [
        bench.Measurement(
            name, m, (4096, 11008), times, 1e10 if m == 1 else math.nan, kernel
        )
        for name, kernel in zip(names, kernels)
    ]
    rows = [
        dataclasses.replace(
            row, bits_per_weight=32.0, temporary_bytes=181_000_000, error=2e-7
        )
        for row in rows
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(*tables(rows))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for name, kernel in zip(names, kernels):
        (i,) = [i for i, line in enumerate(lines) if line.startswith(f"{name}  ")]
        assert lines[i].split()[-1] == "2e-07"
        assert kernel is None or lines[i + 1].startswith(f"  {kernel} ")
    assert ("mem." in lines[2]) == (m == 1)


def test_nothing_is_written(tiny, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (products, decodings), text = _printed(
        80, [(16, 16)], [1], ["int8"], decode=False, out=None
    )
    assert decodings == []
    assert "Decoding" not in text and "Wrote" not in text
    assert list(tmp_path.iterdir()) == []


def test_quick(monkeypatch):
    asked = []

    def measure(shapes, rows, formats, **kwargs):
        asked.append((shapes, rows, formats, kwargs["budget"], kwargs["min_rounds"]))
        return []

    monkeypatch.setattr(_run, "measure", measure)
    monkeypatch.setattr(_run, "measure_decoding", None)
    bench.run(quick=True, out=None, console=Console(file=io.StringIO()))
    bench.run([(8, 8)], quick=True, out=None, console=Console(file=io.StringIO()))
    bench.run(decode=False, out=None, console=Console(file=io.StringIO()))
    assert asked == [
        ([(1024, 4096)], (1, 128), None, 1, 5),
        ([(8, 8)], (1, 128), None, 1, 5),
        ([(4096, 11008)], (1, 128), None, 6, 9),
    ]


def test_figure():
    rows = bench.measure([(16, 32)], [1, 4], ["int8"], budget=0, min_rounds=1, cycle=0)
    panels = bench.figure(rows).axes
    assert [axes.get_title() for axes in panels] == ["1 row", "4 rows"]
    for m, axes in zip((1, 4), panels):
        points = [line.get_xydata()[0].tolist() for line in axes.lines[1:]]
        assert points == [
            [row.bits_per_weight, row.times.ratio] for row in rows if row.rows == m
        ]


def _broken(w):
    raise RuntimeError("cannot do this\nand much more about it")


def _breaks_later(w):
    return Candidate(
        weight=None, nbytes=1, decoded=lambda: w, fn=lambda x, w: _broken(w)
    )


def test_peers_that_raise(tiny, monkeypatch, tmp_path):
    peers = [
        _peer.Peer("broken", (), _broken),
        _peer.Peer("breaks later", (), _breaks_later),
        _peer.Peer("absent", ("no_such_package",), _broken),
    ]
    monkeypatch.setattr(_peer, "_all", peers)
    (products, _), text = _printed(
        200, [(16, 16)], [1], ["int8"], peers=True, decode=False, out=tmp_path
    )
    assert [row.name for row in products[-2:]] == ["broken", "breaks later"]
    for row in products[-2:]:
        assert row.failure == "RuntimeError: cannot do this"
        assert math.isnan(row.times.ratio) and math.isnan(row.error)
        assert row.name in text
    assert text.count("RuntimeError: cannot do this\n") == 0
    assert text.count("RuntimeError: cannot do this") == 2
    assert "much more" not in text
    assert "Not installed, so not measured: no_such_package." in text
    assert [row["failure"] for row in _read(tmp_path / "products.csv")][-2:] == [
        "RuntimeError: cannot do this"
    ] * 2
    assert len(bench.figure(products).axes[0].lines) == len(products[:-2]) + 1


def test_other_errors_are_raised(monkeypatch):
    monkeypatch.setattr(_measure, "product_error", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.measure([(16, 16)], [1], ["int8"])


@pytest.mark.parametrize("version, slow", [((0, 10, 2), True), ((0, 11, 0), False)])
def test_older_jax(tiny, monkeypatch, version, slow):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert _machine.has_slow_lookups() == slow
    _, text = _printed(80, [(16, 16)], [1], ["int8"], decode=False, out=None)
    assert ("JAX 0.11 and newer" in text) == slow
