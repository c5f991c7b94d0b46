"""Runs that were ended on their way, and those that follow."""

import os
import signal
import subprocess
import sys

import pytest

import eqquant as eqq
from eqquant import interop
from eqquant.interop import convert
from eqquant.interop._converting import _output

from . import large


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert") / "model"
    large.write(folder, 64, 96, 1, 64)
    return folder


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


_program = """
import os, signal, sys
from eqquant.interop import convert
source, out, most = sys.argv[1:]
def progress(done, total, name):
    if done > float(most) * total:
        os.kill(os.getpid(), signal.SIGKILL)
convert(source, out, "nf4", shard_size=20_000, progress=progress)
"""


@pytest.mark.processes
def test_killed(source, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    partial = tmp_path / "out.partial"
    expected = convert(source, other, "nf4", shard_size=20_000)
    for most, least in ((0.3, 2), (0.8, 6)):
        argv = [sys.executable, "-c", _program, source, out, str(most)]
        assert subprocess.run(argv).returncode == -signal.SIGKILL
        assert not out.exists()
        text = (partial / "eqquant.journal").read_bytes()
        assert len(text.splitlines()) > least
    for read in (eqq.load, interop.open):
        with pytest.raises(ValueError, match="unfinished output.*again"):
            read(partial)
        for path in (partial / "files").iterdir():
            with pytest.raises(ValueError, match="beginning of one"):
                read(path)
    begun = []
    outcomes = convert(
        source,
        out,
        "nf4",
        shard_size=20_000,
        progress=lambda done, total, name: begun.append(done / total),
    )
    assert begun[0] > 0.5
    assert outcomes == expected
    assert _files(out) == _files(other)
    assert not partial.exists()


def _until(name):
    """Ends the conversion at an array, and leaves what a kill would leave."""

    def progress(done, total, found):
        if found == name:
            raise KeyboardInterrupt

    return progress


@pytest.mark.usefixtures("systems")
def test_what_is_left(source, tmp_path):
    out, partial = tmp_path / "out", tmp_path / "out.partial"

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, "nf4", progress=_until("model.norm.weight"))

    # Of other options, or of another source.
    interrupted()
    for format in ("int8", eqq.NF4(32)):
        with pytest.raises(ValueError, match="out.partial.*options.*fresh"):
            convert(source, out, format)
    convert(source, out, "int8", fresh=True)
    assert interop.open(out)["lm_head.weight"].format == eqq.Int8()
    with pytest.raises(FileExistsError, match="already exists"):
        convert(source, out, "int8")

    # A line of the journal is cut short; bytes of what it tells of are lost.
    out, partial = tmp_path / "second", tmp_path / "second.partial"
    interrupted()
    journal = partial / "eqquant.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines)[:-10])
    (path,) = (partial / "files").iterdir()
    data = bytearray(path.read_bytes())
    data[-3000:-1000] = bytes(2000)
    path.write_bytes(data)
    convert(source, out, "nf4")
    convert(source, tmp_path / "third", "nf4")
    assert _files(out) == _files(tmp_path / "third")


@pytest.mark.usefixtures("systems")
def test_killed_at_the_end(source, tmp_path, monkeypatch):
    out = tmp_path / "out.safetensors"

    def killed(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_output.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, "nf4")
    assert eqq.is_quantized(eqq.load(out)["lm_head"]["weight"])
    with pytest.raises(FileExistsError, match="already exists"):
        convert(source, out, "nf4", fresh=True)
    outcomes = convert(source, out, "nf4")
    assert all(x.sqnr is not None for x in outcomes if x.format is not None)
    assert os.listdir(tmp_path) == ["out.safetensors"]


@pytest.mark.usefixtures("systems")
def test_two_at_once(source, tmp_path):
    def progress(done, total, name):
        for fresh in (False, True):
            with pytest.raises(ValueError, match="by another process"):
                convert(source, tmp_path / "out", "nf4", fresh=fresh)

    convert(source, tmp_path / "out", "nf4", progress=progress)


@pytest.mark.usefixtures("systems")
def test_what_is_not_its_own(source, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "notes").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(FileExistsError, match="out.partial.*other files"):
            convert(source, tmp_path / "out", "nf4", fresh=fresh)
    assert os.listdir(tmp_path) == ["out.partial"]
    assert os.listdir(partial) == ["notes"]
