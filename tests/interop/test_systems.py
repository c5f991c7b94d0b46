"""Files on a system that is like Windows. What other tests of this folder use the
fixture `systems` for is not repeated here."""

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant._cli import main

from ..helpers import normal
from . import files
from .arrays import quantized


@pytest.mark.usefixtures("like_windows")
def test_what_the_system_refuses(path, tmp_path):
    eqq.save(path, [jnp.ones(3)])
    with path.open("rb"), pytest.raises(PermissionError):
        os.replace(path, tmp_path / "other")
    x = np.memmap(path)
    with pytest.raises(PermissionError, match="open in a program") as e:
        eqq.save(path, [jnp.zeros(3)])
    # The file is that of the user, and nothing is left of the other.
    assert e.value.filename == str(path) and os.listdir(tmp_path) == [path.name]
    del x
    path.chmod(0o400)
    with pytest.raises(PermissionError, match="read-only"):
        eqq.save(path, [jnp.zeros(3)])
    assert os.listdir(tmp_path) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert eqq.load(path)[0].tolist() == [1, 1, 1]
    with pytest.raises(PermissionError):
        os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(PermissionError):
        path.unlink()


# Arrays of one page, and of more.
@pytest.mark.parametrize("size", [100, 2**16])
@pytest.mark.usefixtures("systems")
def test_saved_over_what_is_open(size, path):
    eqq.save(path, {"x": jnp.arange(size, dtype=jnp.float32)})
    with interop.open(path) as checkpoint:
        x = checkpoint.entries["x"].numpy()
        assert not x.flags.writeable
        eqq.save(path, {"x": jnp.zeros(size)})
        np.testing.assert_array_equal(x, np.arange(size))
    assert not np.any(eqq.load(path)["x"])


# Where files are open only while they are read, they are not mixed up.
@pytest.mark.usefixtures("like_windows")
def test_in_its_own_place(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    x, y = np.asarray(normal(256, 128)), np.asarray(normal(32, 128))
    folder.mkdir()
    files.save(folder / "model.safetensors", {"x": x, "y": y})
    monkeypatch.chdir(tmp_path)
    with interop.open("model") as checkpoint:
        monkeypatch.chdir(folder)
        interop.write(folder, checkpoint, "mlx")
        for name in "xy":
            with pytest.raises(ValueError, match="changed since it was opened"):
                checkpoint[name]
    with interop.open(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint["x"], x)
    with pytest.raises(ValueError, match="closed"):
        checkpoint["x"]
    with interop.open(folder) as checkpoint:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) - 1000)
        with pytest.raises(ValueError, match="cut short|changed since"):
            checkpoint["x"], checkpoint["y"]


@pytest.mark.usefixtures("systems")
def test_read_in_threads(path):
    arrays = {
        f"{i}": np.full(n, i, np.int32)
        for i, n in enumerate([10, 2**15, 100, 2**17, 2**10] * 8)
    }
    files.save(path, arrays)
    together = threading.Barrier(8)
    with interop.open(path) as checkpoint, ThreadPoolExecutor(8) as pool:

        def read(name):
            together.wait()
            return np.array(checkpoint.entries[name].numpy())

        for name, x in zip(arrays, pool.map(read, arrays)):
            np.testing.assert_array_equal(x, arrays[name])


@pytest.mark.usefixtures("systems")
def test_every_way_in_and_out(tmp_path, capsys):
    q = eqq.quantize(normal(64, 256), "q8_0", axis=-1)
    r = quantized(eqq.Int(4, 64, offset="minimum"), 64, 256)
    eqq.save(tmp_path / "own.safetensors", {"w": q})
    # What text mode would change.
    text = "\r\n\x1a" * 30_000
    interop.write_gguf(tmp_path / "model.gguf", {"w": q}, {"text": text})
    interop.write(tmp_path / "folder", {"a.weight": r}, "mlx")
    interop.convert(tmp_path / "model.gguf", tmp_path / "out", None)
    wanted = np.asarray(q.dequantize())
    found = eqq.load(tmp_path / "own.safetensors")["w"]
    np.testing.assert_array_equal(found.dequantize(), wanted)
    for name in ("model.gguf", "out"):
        with interop.open(tmp_path / name) as checkpoint:
            np.testing.assert_array_equal(checkpoint["w"].dequantize(), wanted)
    with interop.open(tmp_path / "model.gguf") as checkpoint:
        assert checkpoint.metadata["text"] == text
    skeleton = {"a": {"weight": normal(64, 256)}}
    with interop.open(tmp_path / "folder") as checkpoint:
        found = interop.load_into(skeleton, checkpoint)["a"]["weight"]
    np.testing.assert_array_equal(found.dequantize(), r.dequantize())
    for argv in (["inspect"], ["compare", str(tmp_path / "out")]):
        assert main([*argv, str(tmp_path / "model.gguf")]) == 0
