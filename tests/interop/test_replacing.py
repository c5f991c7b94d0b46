import errno
import os
import stat

import jax.numpy as jnp
import pytest
import safetensors.numpy

from eqquant.interop import convert, load, save, write_gguf, write_mlx


class Failure(BaseException):
    pass


def _fail(*args):
    raise Failure


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, {"x": jnp.asarray([1.0, 1.0])})
    return path


def _intact(path):
    x = load(path)["x"]
    return os.listdir(path.parent) == [path.name] and x.tolist() == [1, 1]


def _half_written(file, *args):
    file.write(b"half")
    raise Failure


@pytest.mark.usefixtures("systems")
@pytest.mark.parametrize(
    "target, failing",
    [
        ("eqquant.interop._own._write._write_part", _half_written),
        ("os.fsync", _fail),
        ("os.chmod", _fail),
        ("os.replace", _fail),
    ],
)
def test_failure_midway(target, failing, path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(target, failing)
        with pytest.raises(Failure):
            save(path, {"x": jnp.asarray([0.0, 0.0])})
        with pytest.raises(Failure):
            save(path.parent / "new", {"x": jnp.asarray([0.0, 0.0])})
    assert _intact(path)


def _full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


# A full disk, for which the system names no file.
@pytest.mark.usefixtures("systems")
def test_errors_name_the_file(path, monkeypatch):
    monkeypatch.setattr("eqquant.interop._own._write._write_part", _full)
    monkeypatch.setattr("eqquant.interop._containers.TensorFile.write", _full)
    w = {"x": jnp.asarray([0.0, 0.0])}
    for write in (
        lambda: save(path, w),
        lambda: write_gguf(path, w),
        lambda: write_mlx(path, w),
        lambda: convert(path, path.with_name("out"), None),
    ):
        with pytest.raises(OSError, match="No space left.*(model|out.partial)") as e:
            write()
        assert e.value.errno == errno.ENOSPC and e.value.filename
    assert _intact(path)


@pytest.mark.usefixtures("systems")
def test_synchronised_before_it_is_replaced(path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def tell(name, call):
        def told(*args):
            calls.append(name)
            return call(*args)

        monkeypatch.setattr(os, name, told)

    tell("fsync", fsync)
    tell("replace", replace)
    save(path, {"x": jnp.asarray([0.0, 0.0])})
    assert calls == ["fsync", "fsync", "replace"]


@pytest.mark.usefixtures("systems")
def test_what_cannot_be_saved_leaves_the_file_alone(path):
    with pytest.raises(ValueError):
        save(path, {"x": jnp.asarray([0.0, 0.0]), "y": {b"a": 1}})
    assert _intact(path)


@pytest.mark.usefixtures("systems")
def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "none" / "model.safetensors", [1])


@pytest.mark.usefixtures("systems")
def test_folder(path):
    with pytest.raises(IsADirectoryError, match="`path` should be"):
        save(path.parent, [1])
    assert _intact(path)


@pytest.fixture
def umask():
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions(mask, mode, tmp_path, umask):
    umask(mask)
    path = tmp_path / "model.safetensors"
    for _ in range(2):
        save(path, [1])
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_permissions_of_what_is_replaced_are_kept(path, umask):
    path.chmod(0o440)
    umask(0o022)
    save(path, {"x": jnp.asarray([1.0, 1.0])})
    assert stat.S_IMODE(path.stat().st_mode) == 0o440
    assert _intact(path)


def test_symbolic_links_are_followed(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    save(link, [2])
    assert link.is_symlink()
    assert load(path) == [2]


@pytest.mark.usefixtures("systems")
def test_replacing_what_was_loaded(path):
    loaded = load(path)
    save(path, {"x": jnp.asarray([0.0, 0.0])})
    assert loaded["x"].tolist() == [1, 1]
    assert load(path)["x"].tolist() == [0, 0]
    assert safetensors.numpy.load_file(path)["x"].tolist() == [0, 0]
