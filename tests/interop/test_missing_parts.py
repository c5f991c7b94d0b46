import re

import numpy as np
import pytest

from eqquant import interop

from . import files


_x = np.ones((2, 3), np.float32)


def _name(i, n, suffix):
    return f"model-{i:05}-of-{n:05}.{suffix}"


def _safetensors(folder, *which):
    for i in which:
        files.save(folder / _name(i, 3, "safetensors"), {f"w{i}": _x})


def _gguf(folder, *which):
    for i in which:
        metadata = {"split.no": i - 1, "split.count": 3, "split.tensors.count": 3}
        path = folder / _name(i, 3, "gguf")
        interop.write_gguf(path, {f"w{i}": _x}, {"general.name": "a"} | metadata)


@pytest.mark.parametrize("write", [_safetensors, _gguf])
@pytest.mark.parametrize("which", [(1, 3), (1,), (2, 3), (1, 2)])
def test_folder_without_some(write, which, tmp_path):
    write(tmp_path, *which)
    suffix = write.__name__[1:]
    missing = [repr(_name(i, 3, suffix)) for i in (1, 2, 3) if i not in which]
    with pytest.raises(FileNotFoundError, match=re.escape(", ".join(missing))):
        interop.open(tmp_path)


@pytest.mark.parametrize("write", [_safetensors, _gguf])
def test_folder_with_all(write, tmp_path):
    write(tmp_path, 1, 2, 3)
    with interop.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["w1", "w2", "w3"]
        # Nothing is left of the splitting.
        expected = {"general.name": "a"} if write is _gguf else {}
        assert checkpoint.metadata == expected


def test_one_of_several_by_its_name(tmp_path):
    _safetensors(tmp_path, 2)
    with interop.open(tmp_path / _name(2, 3, "safetensors")) as checkpoint:
        assert list(checkpoint) == ["w2"]
    _gguf(tmp_path, 2)
    with pytest.raises(FileNotFoundError, match="00001-of-00003.gguf"):
        interop.open(tmp_path / _name(2, 3, "gguf"))


@pytest.mark.parametrize("name", ["model.gguf", _name(1, 1, "gguf")])
def test_renamed_part(name, tmp_path):
    _gguf(tmp_path, 2)
    (tmp_path / _name(2, 3, "gguf")).rename(tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(ValueError, match="is part 2 of the 3 files of a model"):
            interop.open(path)


def test_parts_in_another_order(tmp_path):
    _gguf(tmp_path, 1, 2, 3)
    (tmp_path / _name(1, 3, "gguf")).rename(tmp_path / "a")
    (tmp_path / _name(2, 3, "gguf")).rename(tmp_path / _name(1, 3, "gguf"))
    (tmp_path / "a").rename(tmp_path / _name(2, 3, "gguf"))
    with pytest.raises(ValueError, match="is part 2 of the 3 files .* and part 1"):
        interop.open(tmp_path)


@pytest.mark.parametrize("value", ["a", [1], 1.5, -1, 2**40, True])
def test_split_that_is_none(value, tmp_path):
    interop.write_gguf(tmp_path / "a.gguf", {"w": _x}, {"split.count": value})
    if value is True:
        interop.open(tmp_path)
        return
    with pytest.raises(ValueError, match="a.gguf' is part None of the .* files"):
        interop.open(tmp_path)
