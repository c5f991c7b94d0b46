import errno
import os

import jax.numpy as jnp
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant._cli import main


_array = eqq.quantize(jnp.ones((8, 64)), "q8_0", axis=-1)
_words = eqq.quantize(jnp.ones((8, 64)), eqq.Int(4, 32, "minimum"), axis=-1)


def _save(path):
    eqq.save(path, {"w": _array})


def _write_gguf(path):
    interop.write_gguf(path, {"w": _array})


def _write_mlx(path):
    interop.write_mlx(path, {"w.weight": _words})


def _convert(path):
    interop.convert("source.safetensors", path)


writers = pytest.mark.parametrize("write", (_save, _write_gguf, _write_mlx, _convert))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    eqq.save("source.safetensors", {"w": jnp.ones((8, 64))})
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize("write", (_save, _write_gguf))
@pytest.mark.parametrize("path", ("no/m.gguf", "no/no/m.gguf", "no/../no/m.gguf"))
def test_no_folder(write, path, folder):
    with pytest.raises(FileNotFoundError) as e:
        write(path)
    message = str(e.value)
    assert repr(path) in message and "makedirs" in message
    assert f"no folder {os.path.dirname(os.path.realpath(path))!r}" in message
    assert ".tmp" not in message
    assert sorted(os.listdir(folder)) == ["file", "source.safetensors"]


@writers
def test_folder_that_is_a_file(write):
    for path in ("file/m.safetensors", "file/no/m.safetensors"):
        with pytest.raises(NotADirectoryError, match=r"file' is not a folder") as e:
            write(path)
        assert repr(path) in str(e.value) or os.path.abspath(path) in str(e.value)
        assert ".tmp" not in str(e.value) and ".partial" not in str(e.value)


@writers
def test_folder_without_permission(write, folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="is not writable") as e:
        write("m.safetensors")
    assert repr(os.path.realpath(folder)) in str(e.value)


@pytest.mark.parametrize("write", (_save, _write_gguf))
def test_what_the_file_system_refuses_is_of_the_folder(write, folder, monkeypatch):
    def refused(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "of no interest")

    monkeypatch.setattr("eqquant.interop._replacing.open", refused, raising=False)
    with pytest.raises(OSError, match="No space left") as e:
        write("m.safetensors")
    assert e.value.errno == errno.ENOSPC
    assert e.value.filename == os.path.realpath(folder)


@pytest.mark.parametrize("write", (_write_mlx, _convert))
def test_folder_is_made(write, folder):
    write("new/folder/m.safetensors")
    assert (folder / "new/folder/m.safetensors").is_file()


@pytest.mark.parametrize("write", (_save, _write_gguf))
def test_path_of_a_folder(write, folder):
    (folder / "here").mkdir()
    with pytest.raises(IsADirectoryError, match="be the path of a file. Got here"):
        write("here")


def test_command(capsys):
    assert main(["quantize", "source.safetensors", "file/out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "file' is not a folder" in line and "Errno" not in line
