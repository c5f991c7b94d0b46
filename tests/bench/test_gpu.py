import dataclasses
import io
import json

import jax.numpy as jnp
import pytest
from rich.console import Console

import eqquant as eqq
from eqquant import bench
from eqquant._cli import main
from eqquant.bench._gpu import _measure


# On the CPU, through the same calls.
few = dict(cycle=0, copied=2**12, turn=0, rounds=1)
cases = [((128, 64), 1), ((64, 32), 3)]
formats = [bench.Quantization(eqq.NF4(64)), bench.Quantization(eqq.Int8(), eqq.Int8())]


def test_everything_is_shown_and_written(tmp_path):
    file = io.StringIO()
    rows = bench.run_gpu(
        cases,
        formats[1:],
        out=tmp_path / "new",
        console=Console(file=file, width=120),
        **few,
    )
    assert [row.name for row in rows] == 2 * ["bfloat16", "Int8(), x Int8()"]
    assert [(row.shape, row.rows) for row in rows] == [c for c in cases for _ in "12"]
    for row in rows:
        assert row.is_right and row.error > 0
        assert (row.kernel is None) == (row.name == "bfloat16")
        assert row.ratio == row.baseline / row.seconds
        assert row.bandwidth == row.nbytes / row.seconds / row.copy
    assert rows[0].ratio == 1 and rows[0].nbytes == 128 * 64 * 2
    lines = file.getvalue().splitlines()
    for row in rows:
        (line,) = [
            line
            for line in lines
            if line.strip().startswith(f"{row.name} ")
            and f" {row.shape[0]}x{row.shape[1]} " in line
        ]
        assert line.split()[-1] == f"{row.error:.0e}"
        assert line.split()[-2] == f"{row.ratio:.2f}"
    path = tmp_path / "new" / "gpu.json"
    assert bench.read_gpu(path) == rows
    assert set(json.loads(path.read_text())) == {"device", "jax", "products"}
    markdown = Console(file=io.StringIO(), width=200)
    markdown.print(bench.gpu_table(rows, markdown=True))
    first, *_ = markdown.file.getvalue().strip().splitlines()
    assert first.startswith("| format") and first.endswith("|")


def test_wrong_products_are_told_of(tmp_path, monkeypatch):
    real = _measure.explain

    def explain(x, q):
        return dataclasses.replace(real(x, q), error=-1.0)

    monkeypatch.setattr(_measure, "explain", explain)
    console = Console(file=io.StringIO(), width=120)
    rows = bench.run_gpu(cases[:1], formats[:1], out=tmp_path, console=console, **few)
    assert [row.is_right for row in rows] == [True, False]
    assert "NF4(), 1 rows: error" in console.file.getvalue()


def test_without_a_gpu(capsys, tmp_path):
    assert main(["bench", "--platform", "gpu", "--out", str(tmp_path / "new")]) == 2
    message = "eqquant bench: --platform gpu needs a GPU that JAX can use. Got cpu\n"
    assert capsys.readouterr().err == message
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("right, status", ((True, 0), (False, 1)))
def test_status(monkeypatch, tmp_path, capsys, right, status):
    row = bench.GPUMeasurement(
        "NF4()", (1, 1), 1, "k", 1.0, 1.0, 1, 1.0, 0.0 if right else 2.0, 1.0
    )
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    wanted = []

    def run_gpu(cases, formats, out):
        wanted.append((list(cases), [str(format) for format in formats]))
        return [row]

    monkeypatch.setattr(bench, "run_gpu", run_gpu)
    command = ["bench", "--platform", "gpu", "--out", str(tmp_path)]
    assert main(command) == status
    assert wanted.pop()[0] == list(bench.default_cases)
    assert (
        main([*command, "--shape", "64x32", "--rows", "3", "--formats", "nf4"])
        == status
    )
    assert wanted.pop() == ([((64, 32), 3)], ["NF4()"])
    every = [bench.as_quantization(name) for name in ("nf4", "rsrbinary", "int8:int8")]
    monkeypatch.setattr(bench, "all_formats", lambda: every)
    assert main([*command, "--formats", "all"]) == status
    assert wanted.pop()[1] == ["NF4()", "Int8(), x Int8()"]
    assert main([*command, "--formats", "RSRBinary(8)"]) == 2
    assert "no kernels for GPUs for RSRBinary()" in capsys.readouterr().err


# XLA leaves out what nobody reads.
@pytest.mark.optimized
def test_every_product_is_computed():
    x, w = jnp.ones((3, 64)), jnp.ones((64, 32))
    compiled = _measure._products.lower(x, [w] * 5).compile()
    assert compiled.cost_analysis()["flops"] == 5 * 2 * 3 * 64 * 32
