"""What is at the place of an output before, and after a call that failed."""

import os
import pathlib

import numpy as np
import pytest

from eqquant import interop
from eqquant._cli import main
from eqquant.interop import convert
from eqquant.interop._converting import _output

from ..helpers import normal
from . import files


_names = ("a.weight", "b.weight", "c.weight")


@pytest.fixture
def source(tmp_path):
    arrays = {name: np.asarray(normal(64, 64)) for name in _names}
    path = tmp_path / "in" / "model.safetensors"
    path.parent.mkdir()
    files.save(path, arrays)
    return path


def _bad(source):
    arrays = {name: np.array(normal(64, 64)) for name in _names}
    arrays["c.weight"][0, 0] = np.nan
    path = source.with_name("bad.safetensors")
    files.save(path, arrays)
    return path


@pytest.mark.usefixtures("systems")
@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_after_an_error(name, source, tmp_path):
    out = tmp_path / name
    bad = _bad(source)
    with pytest.raises(ValueError, match="'c.weight'.*A rule"):
        convert(bad, out, "nf4")
    assert os.listdir(tmp_path) == ["in"]
    # The corrected call needs no `fresh`.
    convert(bad, out, "nf4", rules=[("c.*", None)])
    assert interop.open(out)["c.weight"].shape == (64, 64)


# What ended before anything was written leaves nothing; otherwise, it resumes.
@pytest.mark.usefixtures("systems")
@pytest.mark.parametrize("first", ["a", "b"])
def test_after_a_full_disk(first, source, tmp_path, monkeypatch):
    out, write = tmp_path / "out", _output.TensorFile.write

    def full(self, name, x):
        if name.startswith(first):
            raise OSError(28, "No space left on device")
        write(self, name, x)

    with monkeypatch.context() as patch:
        patch.setattr(_output.TensorFile, "write", full)
        with pytest.raises(OSError, match="No space left"):
            convert(source, out, "nf4")
    left = ["in"] if first == "a" else ["in", "out.partial"]
    assert sorted(os.listdir(tmp_path)) == left
    begun = []
    convert(source, out, "nf4", progress=lambda done, total, name: begun.append(done))
    assert (begun[0] > 0) == (first == "b")


@pytest.mark.usefixtures("systems")
def test_options_that_differ(source, tmp_path, capsys):
    def ended(done, total, name):
        if name == "b.weight":
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "nf4", progress=ended)
    argv = ["quantize", str(source), str(out), "--format", "int8"]
    assert main(argv) == 2
    assert "--fresh" in capsys.readouterr().err
    assert main([*argv, "--fresh"]) == 0


@pytest.mark.parametrize("damage", ["cut", "list", "empty", "no checksums"])
def test_a_damaged_journal(damage, source, tmp_path, capsys):
    def ended(done, total, name):
        if name == "b.weight":
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "nf4", progress=ended)
    journal = tmp_path / "out.partial" / "eqquant.journal"
    lines = journal.read_bytes().splitlines()
    lines[1] = {
        "cut": lines[1][:12],
        "list": b"[1]",
        "empty": b"",
        "no checksums": b'{"name": "a.weight"}',
    }[damage]
    journal.write_bytes(b"\n".join(lines) + b"\n")
    argv = ["quantize", str(source), str(out)]
    assert main(argv) == 2
    text = capsys.readouterr().err
    assert str(journal) in text and "damaged" in text and "--fresh" in text
    assert main([*argv, "--fresh"]) == 0


@pytest.mark.usefixtures("systems")
@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_a_folder(there, source, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if there:
        (disk / "model").mkdir()
    out = tmp_path / "out"
    out.symlink_to(disk / "model")
    convert(source, out, "nf4")
    assert out.is_symlink() and os.listdir(disk) == ["model"]
    assert set(interop.open(out)) == set(_names)
    with pytest.raises(FileExistsError, match="already exists"):
        convert(source, out, "nf4")


@pytest.mark.usefixtures("systems")
def test_where_a_disk_begins(source, tmp_path, monkeypatch):
    out = tmp_path / "disk"
    out.mkdir()
    is_mount = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: path == out or is_mount(path))
    for path in (out, "/"):
        with pytest.raises(ValueError, match="new folder in it"):
            convert(source, path, "nf4")
    convert(source, out / "model", "nf4")


def test_files_that_go_with_another(source, tmp_path):
    out, beside = tmp_path / "m.safetensors", tmp_path / "m.config.json"
    beside.write_text("mine")
    with pytest.raises(FileExistsError, match="m.config.json.*goes with"):
        convert(source, out, "int8", to="compressed-tensors")
    assert beside.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["in", "m.config.json"]
    convert(source, out, "int8")
    assert beside.read_text() == "mine"
    dangling = tmp_path / "n.safetensors"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="already exists"):
        convert(source, dangling, "int8")


# Ended between the file beside and the file itself, it goes on.
@pytest.mark.usefixtures("systems")
def test_interrupted_between_two_files(source, tmp_path, monkeypatch):
    out = tmp_path / "m.safetensors"
    replace = os.replace

    def ended(old, new):
        if pathlib.Path(new) == out:
            raise KeyboardInterrupt
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", ended)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, "int8", to="compressed-tensors")
    assert (tmp_path / "m.config.json").is_file() and not out.exists()
    convert(source, out, "int8", to="compressed-tensors")
    assert interop.open(out).kind == "compressed-tensors"


def test_capitals(source, tmp_path):
    for name, kind in (("m.GGUF", "gguf"), ("m.SafeTensors", "eqquant")):
        convert(source, tmp_path / name, "q8_0")
        assert (tmp_path / name).is_file()
        assert interop.open(tmp_path / name).kind == kind
