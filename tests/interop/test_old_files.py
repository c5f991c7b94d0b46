"""Files that earlier versions wrote still load: the same formats, shapes and numbers.

Next to each quantized array, the file has the dense array that the version which wrote
it decoded. `python -m tests.interop.test_old_files FOLDER` writes such files anew."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqquant as eqq
from eqquant import interop

from ..helpers import normal
from .same import same


data = pathlib.Path(__file__).parent.parent / "data"
versions = (1,)


def _packed():
    stack = eqq.quantize(normal(2, 3, 40, 6, seed=3), eqq.Int4(16, symmetric=False))
    tied = eqq.quantize(normal(4, 20, seed=5), eqq.Int(3, 16, "minimum"), axis=-1)
    signs = jnp.round(jnp.clip(normal(21, 9, seed=8), -1, 1))
    ternary = eqq.quantize(normal(17, 8, seed=9), eqq.Ternary())
    stacked = eqq.quantize(normal(2, 17, 8, seed=9), eqq.Ternary(16))
    half = normal(6, 20, seed=2).astype(jnp.bfloat16)
    filters = normal(4, 3, 2, 5, seed=11)
    nested = eqq.Nested(eqq.NF4(16), eqq.Int8(16))
    return {
        "nf4": eqq.quantize(normal(35, 6, seed=1), eqq.NF4(16)),
        "int8": eqq.quantize(half, eqq.Int8(), axis=-1, activation=eqq.Int8()),
        "stack": stack,
        "stack_transposed": stack.mT,
        "nested": eqq.quantize(normal(48, 5, seed=4), nested),
        "tied": [tied, tied, tied.T],
        "mxfp4": eqq.quantize(normal(2, 33, 4, seed=6), eqq.MXFP4()),
        "q4_k": eqq.quantize(normal(2, 256, seed=7), eqq.formats.Q4_K(), axis=-1),
        "rsr": eqq.quantize(signs, eqq.RSRTernary(k=3)),
        "gpu": eqq.tree_prepack(ternary, "gpu"),
        "tpu": eqq.tree_prepack(stacked, "tpu"),
        "vector": eqq.quantize(normal(19, seed=10), eqq.NF4(16)),
        "filters": eqq.quantize(filters, eqq.Int8(), axis=(-3, -2, -1)),
        "sharded": eqq.quantize(normal(16, 8, seed=12), "int8").with_sharding(
            P("a", None)
        ),
    }


def _others():
    numpy = [np.arange(3, dtype=np.int16), np.float64(0.1)]
    python = [1, True, 2.5, 1j, None, {("a", 0): -1}]
    return [jnp.arange(3), *numpy, *python, jr.key(7)]


def _dense(tree):
    return jtu.tree_map(lambda q: q.dequantize(), tree, is_leaf=eqq.is_quantized)


def _write(folder):
    packed = _packed()
    tree = {"packed": packed, "dense": _dense(packed), "others": _others()}
    eqq.save(folder / "model.safetensors", tree)
    weights = {name: {"weight": normal(6, 64)} for name in ("a", "b")}
    eqq.save(folder / "source.safetensors", weights)
    interop.convert(
        folder / "source.safetensors",
        folder / "convert",
        "nf4",
        min_size=1,
        shard_size=300,
    )


def _check(packed, dense, expected):
    # All that is static of the quantized arrays is part of the structure.
    assert jtu.tree_structure(packed) == jtu.tree_structure(expected)
    for (path, found), w in zip(
        jtu.tree_leaves_with_path(_dense(packed)), jtu.tree_leaves(dense), strict=True
    ):
        assert (found.shape, found.dtype) == (w.shape, w.dtype)
        _check_numbers(found, w, jtu.keystr(path))


def _check_numbers(found, expected, name):
    # XLA may fuse the multiplication by a scale with the addition of a minimum.
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    np.testing.assert_allclose(found, expected, 1e-6, err_msg=name)


@pytest.fixture(params=versions, ids="version {}".format)
def folder(request):
    return data / f"saved_by_version_{request.param}"


def test_load(folder):
    loaded = eqq.load(folder / "model.safetensors")
    expected = _packed()
    _check(loaded["packed"], loaded["dense"], eqq.tree_prepack(expected, "cpu"))
    assert same(loaded["others"], _others())
    tied = loaded["packed"]["tied"]
    assert tied[0] is tied[1]
    assert tied[0].stored["codes"] is tied[2].stored["codes"]


@pytest.mark.thorough
def test_load_as_a_model_lies(folder):
    like = {"packed": eqq.tree_prepack(_packed(), "gpu")}
    like |= {"dense": _dense(like["packed"]), "others": _others()}
    loaded = eqq.load(folder / "model.safetensors", like=like)
    _check(loaded["packed"], loaded["dense"], like["packed"])


def test_open(folder):
    loaded = eqq.load(folder / "model.safetensors")["dense"]
    checkpoint = interop.open(folder / "model.safetensors")
    for name in ("nf4", "stack", "nested", "q4_k", "gpu", "tpu", "filters"):
        _check_numbers(checkpoint[f"packed.{name}"].dequantize(), loaded[name], name)


def test_several_files(folder):
    expected = eqq.quantize(normal(6, 64), "nf4", axis=-1)
    loaded = eqq.load(folder / "convert")
    for name in ("a", "b"):
        assert same(loaded[name]["weight"], expected)


if __name__ == "__main__":
    with jax.enable_x64(False):
        _write(pathlib.Path(sys.argv[1]))
