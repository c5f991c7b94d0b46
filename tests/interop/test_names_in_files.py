"""Names of arrays in files, which `open` gives, are those that they have."""

import itertools as it

import numpy as np
import pytest
import safetensors.numpy

import eqquant as eqq
from eqquant import interop

from ..helpers import normal
from . import files


_odd = ("", "value", "value#2", ".", "a.", "a..b", "a", "a.0", "a.00", "d#2", "層.重み")


@pytest.mark.parametrize("names", list(it.permutations(_odd[:3])), ids=str)
def test_an_empty_name(names, tmp_path):
    arrays = {name: np.full(3, i, np.float32) for i, name in enumerate(names)}
    eqq.save(tmp_path / "a.safetensors", arrays)
    for found in (
        interop.open(tmp_path / "a.safetensors"),
        safetensors.numpy.load_file(tmp_path / "a.safetensors"),
        eqq.load(tmp_path / "a.safetensors"),
    ):
        assert {k: x.tolist() for k, x in found.items()} == {
            k: x.tolist() for k, x in arrays.items()
        }


@pytest.mark.parametrize("seed", range(4))
def test_odd_names_are_converted(seed, tmp_path):
    order = np.random.default_rng(seed).permutation(len(_odd))
    arrays = {_odd[i]: np.full(3, i, np.float32) for i in order}
    files.save(tmp_path / "a.safetensors", arrays)
    interop.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", None)
    found = interop.open(tmp_path / "b.safetensors")
    assert set(found) == set(arrays)
    for name, x in arrays.items():
        assert np.array_equal(found[name], x)


# A name that is made up, of a stored array or of a second path, is not another's.
def test_names_that_are_made_up(tmp_path):
    q = eqq.quantize(normal(16, 16))
    x, y, z, codes = (np.full(2, i, np.float32) for i in range(4))
    tree = {
        "w": q,
        "w.codes": codes,
        "a": {"b": x},
        "a.b": y,
        "a.b#2": z,
    }
    eqq.save(tmp_path / "a.safetensors", tree)
    found = interop.open(tmp_path / "a.safetensors")
    assert np.array_equal(found["w.codes"], codes)
    assert np.array_equal(found["a.b#2"], z)
    assert np.array_equal(found["w"].dequantize(), q.dequantize())
    again = eqq.load(tmp_path / "a.safetensors", like=tree)
    for name in ("w.codes", "a.b", "a.b#2"):
        assert np.array_equal(again[name], tree[name])
