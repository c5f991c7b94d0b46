"""What commands print, wherever they print it: in any encoding, from any file."""

import importlib
import io
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import eqquant as eqq
from eqquant import bench, demo, interop
from eqquant._cli import main
from eqquant._report import FormatRow, FormatTable
from eqquant._tree import printable

from .helpers import normal
from .interop import files


# The title of a window, a cleared screen, text from right to left, C1, and markup.
_evil = "a\x1b]0;owned\x07\x1b[2J\u202e\u2028\x9b\x7f\n[/red]層"


@pytest.fixture
def folder(tmp_path):
    arrays = {f"{_evil}.{i}.w": np.asarray(normal(64, 64)) for i in range(10)}
    arrays |= {f"{_evil}.b": np.ones(3, np.float32), "one": np.asarray(normal(64, 64))}
    files.save(tmp_path / "a.safetensors", arrays)
    arrays = {_evil: eqq.quantize(normal(64, 64), "q4_0", axis=-1), "two": normal(3)}
    metadata = {_evil: _evil, "list": [_evil] * 5}
    interop.write_gguf(tmp_path / "b.gguf", arrays, metadata)
    interop.save(tmp_path / "c.safetensors", {_evil: {"x": normal(3)}})
    (tmp_path / "tokens.txt").write_text("1 2 3")
    return tmp_path


def _commands(folder):
    """Calls of all commands, and words of what they print."""
    a, b, c = (str(folder / x) for x in ("a.safetensors", "b.gguf", "c.safetensors"))
    out = str(folder / "out")
    return {
        "inspect": (["inspect", a], "→"),
        "inspect gguf": (["inspect", b], "Q4_0"),
        "inspect own": (["inspect", c], "x"),
        "compare": (["compare", a, a], "exact"),
        "compare others": (["compare", a, c], "no names in common"),
        "quantize": (["quantize", a, out], "dB"),
        "quantize again": (["quantize", b, out], "--requantize"),
        "quantize gguf": (["quantize", a, f"{out}.gguf", "--format", "q4_k"], "256"),
        "formats": (["formats"], "Int8()"),
        "evaluate": (["evaluate", a, str(folder / "tokens.txt")], "eqx-zoo"),
        "demo": (["demo", "--out", a], "folder"),
        "bench": (["bench", "--out", a], "folder"),
    }


_names = list(_commands(pathlib.Path()))


@pytest.fixture
def call(folder, monkeypatch):
    """Calls a command, and returns what it prints in an encoding."""
    room = importlib.import_module("eqquant._report")
    table = FormatTable([FormatRow("Int8()", 8.01, 41.3, 33.8, None)])
    monkeypatch.setattr(room, "format_table", lambda losses: table)
    monkeypatch.setitem(sys.modules, "eqx_zoo", None)

    def call(name, encoding):
        argv, words = _commands(folder)[name]
        printed = []
        with monkeypatch.context() as patch:
            for stream in ("stdout", "stderr"):
                # As Python makes them.
                errors = "strict" if stream == "stdout" else "backslashreplace"
                file = io.TextIOWrapper(io.BytesIO(), encoding, errors, newline="\n")
                patch.setattr(sys, stream, file)
                printed.append(file)
            main(argv)
            for file in printed:
                file.flush()
        text = "".join(x.buffer.getvalue().decode(encoding) for x in printed)
        assert sys.stdout.errors != "eqquant"
        return text, words

    return call


@pytest.mark.parametrize("encoding", ["ascii", "cp437", "cp1252", "utf-8"])
@pytest.mark.parametrize("name", _names)
def test_every_encoding(name, encoding, call):
    text, words = call(name, encoding)
    if encoding != "utf-8":
        words = words.replace("→", "->")
    assert words in text
    assert all(c.isprintable() for c in text.replace("\n", ""))


# What Python programs print, without the command.
@pytest.mark.parametrize("encoding", ["ascii", "cp437", "cp1252", "utf-8"])
def test_reports_in_every_encoding(encoding, folder, monkeypatch):
    file = io.TextIOWrapper(io.BytesIO(), encoding, newline="\n")
    q = eqq.quantize(normal(64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        print(eqq.report({"a": q, "b": normal(3)}))
        print(
            eqq.explain(normal(64), q), eqq.report(eqq.load(folder / "c.safetensors"))
        )
        file.flush()
    lines = file.buffer.getvalue().decode(encoding).splitlines()
    assert ("→" if encoding == "utf-8" else "->") in "".join(lines)
    # A line below the heading.
    assert ("-" if encoding in ("ascii", "cp1252") else "─") * 20 in lines[1]


@pytest.mark.parametrize(
    "run, inner",
    [
        ("demo.run", "demo._run.standard_library"),
        ("demo.run_calibrated", "demo._calibrated.standard_library"),
        ("demo.run_llama", "demo._llama._run.open"),
        ("bench.run", "bench._run.describe_machine"),
        ("bench.run_generation", "bench._generation._generation.describe_machine"),
    ],
)
def test_what_they_print_in_every_encoding(run, inner, monkeypatch):
    def speaks(*args):
        print("層 → é")
        raise KeyError

    room, name = run.split(".")
    run = getattr(importlib.import_module(f"eqquant.{room}"), name)
    file = io.TextIOWrapper(io.BytesIO(), "cp437", newline="\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(f"eqquant.{inner}", speaks)
        with pytest.raises(KeyError):
            run("path") if name == "run_llama" else run()
        file.flush()
        assert file.errors == "strict"
    assert file.buffer.getvalue().decode("cp437") == "\\u5c64 -> é\n"


@pytest.mark.parametrize("name", [x for x in _names if "own" not in x])
def test_lines(name, call):
    # (The name has a newline, too.)
    text, _ = call(name, "utf-8")
    assert not any(line.startswith("[/red]") for line in text.splitlines())


def test_printable():
    for code in [*range(0x3000), *range(0xD800, 0x10000), 0xE0001, 0x10FFFF]:
        c = chr(code)
        assert printable(c) == (c if c.isprintable() else repr(c)[1:-1])
        assert printable(c).isprintable()
    assert printable("層.重み é") == "層.重み é"


def test_reports_of_trees(folder):
    tree = eqq.load(folder / "c.safetensors")
    text = repr(eqq.report(tree)) + repr(tree)
    assert all(c.isprintable() for c in text.replace("\n", ""))
    assert "\\x1b]0;owned" in text
    with pytest.raises(ValueError) as e:
        eqq.load(folder / "c.safetensors", like={"a": tree})
    assert all(c.isprintable() for c in str(e.value).replace("\n", ""))
    with pytest.raises(ValueError) as e:
        eqq.save(folder / "d.safetensors", {_evil: {1j: normal(3)}})
    assert all(c.isprintable() for c in str(e.value).replace("\n", ""))


#
# Interruptions
#


@pytest.mark.parametrize("command", ["inspect", "compare", "demo", "bench"])
def test_interrupted(command, folder, monkeypatch, capsys):
    def end(*args, **kwargs):
        raise KeyboardInterrupt

    for room, name in ((interop, "open"), (demo, "run"), (bench, "run")):
        monkeypatch.setattr(room, name, end)
    monkeypatch.chdir(folder)
    more = {"inspect": "a", "compare": "ab", "demo": ["--train"]}
    assert main([command, *more.get(command, [])]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"eqquant {command}: interrupted.\n"


#
# Of whole processes
#


def _run(argv, stdout, env=()):
    argv = [sys.executable, "-m", "eqquant", *map(str, argv)]
    env = {**os.environ, **dict(env)}
    return subprocess.Popen(
        argv, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env
    )


@pytest.mark.processes
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="as Linux has it")
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("name", ["inspect", "compare", "quantize"])
def test_full(name, buffered, folder):
    argv, _ = _commands(folder)[name]
    with open("/dev/full", "w") as full:
        process = _run(argv, full, {"PYTHONUNBUFFERED": buffered})
        _, text = process.communicate()
    assert process.returncode == 2
    (line,) = text.splitlines()
    assert line.startswith("eqquant") and "No space left" in line


# As Windows has it where output is no console.
@pytest.mark.processes
@pytest.mark.parametrize("encoding", ["cp437", "cp1252"])
def test_encodings_of_windows(encoding, folder):
    env = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    missing = str(folder / "層→.safetensors")
    for argv, status in ((["inspect", folder / "a.safetensors"], 0), ([missing], 2)):
        argv = argv if status == 0 else ["inspect", *argv]
        printed = subprocess.run(
            [sys.executable, "-m", "eqquant", *map(str, argv)],
            capture_output=True,
            env={**os.environ, **env},
        )
        text = (printed.stdout + printed.stderr).decode(encoding)
        assert printed.returncode == status and "Traceback" not in text
        assert ("->" if status == 0 else "\\u") in text


@pytest.mark.processes
def test_a_closed_pipe(folder):
    argv = ["inspect", folder / "a.safetensors"]
    process = _run(argv, subprocess.PIPE, {"PYTHONUNBUFFERED": ""})
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    text = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1 and text == ""


@pytest.mark.processes
def test_interrupted_on_its_way(folder):
    arrays = {f"{i}.w": np.asarray(normal(512, 4096)) for i in range(40)}
    files.save(folder / "large.safetensors", arrays)
    process = _run(["quantize", folder / "large.safetensors", folder / "out"], None)
    while not list(folder.glob("out.partial/files/*")):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, text = process.communicate()
    assert process.returncode == 130
    (line,) = text.splitlines()
    assert "interrupted" in line


_script = "import sys\nfrom eqquant._cli import main\nsys.exit(main())\n"


@pytest.mark.processes
@pytest.mark.parametrize("of_package", (True, False))
def test_interrupted_while_it_is_imported(tmp_path, of_package):
    # (By Ctrl-C where another package is imported.)
    stub = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / "equinox.py").write_text(stub)
    (tmp_path / "eqquant").write_text(_script)
    (tmp_path / "other").write_text(_script)
    package = pathlib.Path(eqq.__file__).parents[1]
    path = os.pathsep.join([str(tmp_path / "stubs"), str(package)])

    def run(*argv):
        argv = (sys.executable, *argv, "formats")
        env = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(argv, env=env, capture_output=True, text=True)

    done = run("-m", "eqquant") if of_package else run(tmp_path / "eqquant")
    assert (done.returncode, done.stderr) == (130, "eqquant: interrupted.\n")
    # Other programs have what Python does.
    assert "Traceback" in run(tmp_path / "other").stderr


@pytest.mark.processes
def test_no_output(folder):
    command = f"{sys.executable} -m eqquant formats >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
