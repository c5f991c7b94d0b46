import os
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant.interop import convert

from ..helpers import normal
from . import files, llama
from .same import same


_affine = eqq.Int(4, 32, "minimum")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What matrices there may be in a file."""
    path = tmp_path_factory.mktemp("kinds") / "model.safetensors"
    tensors = {
        "tok_embeddings.weight": normal(64, 64),
        "layers.0.up.weight": normal(64, 64),
        "layers.0.up.bias": normal(64),
        "layers.0.bias.table": normal(64, 64),
        "layers.0.post_norm.weight": normal(64, 64),
        "conv.weight": normal(64, 64, 3),
        "experts.weight": normal(2, 64, 64),
        "small.weight": normal(8, 64),
        "half.weight": normal(64, 64, dtype=jnp.bfloat16),
        "positions": np.arange(4096).reshape(64, 64),
    }
    tensors = {name: np.asarray(x) for name, x in tensors.items()}
    files.save(
        path, tensors, config={"model_type": "test", "quantization": {"bits": 4}}
    )
    (path.parent / "tokenizer.json").write_text("{}")
    return path


def _formats(outcomes):
    return {x.name: x.format for x in outcomes if x.format is not None}


def test_which(source, tmp_path):
    nf4 = str(eqq.NF4())
    outcomes = convert(source, tmp_path / "a", "nf4")
    big = ("layers.0.up.weight", "experts.weight", "half.weight")
    assert _formats(outcomes) == dict.fromkeys((*big, "layers.0.bias.table"), nf4)
    reasons = {x.name: x.reason for x in outcomes if x.format is None}
    assert reasons == {
        "tok_embeddings.weight": "an embedding, by its name",
        "layers.0.up.bias": "a vector",
        "layers.0.post_norm.weight": "a parameter of a norm, by its name",
        "conv.weight": "the filter of a convolution, by its shape",
        "small.weight": "fewer than 1024 numbers",
        "positions": "int64, not floating-point",
    }
    rules = [
        ("*.up.*", eqq.Int8()),
        ("small.*", True),
        ("*.post_norm.*", "nf4"),
        ("*.up.bias", "int8"),
        ("half.*", None),
    ]
    outcomes = convert(
        source,
        tmp_path / "b",
        "nf4",
        rules=rules,
        embeddings=True,
        min_size=5000,
    )
    assert _formats(outcomes) == {
        "layers.0.up.weight": str(eqq.Int8()),
        "small.weight": nf4,
        "layers.0.post_norm.weight": nf4,
        "experts.weight": nf4,
    }
    half = next(x for x in outcomes if x.name == "half.weight")
    assert half.reason == "left out by the rule 'half.*'"


def test_axes(source, tmp_path):
    out = tmp_path / "out"
    axis = [("half.*", -1), ("[hle]*", -2)]
    outcomes = convert(source, out, "nf4", axis=axis)
    found = {x.name: x.axis for x in outcomes if x.format is not None}
    names = ("layers.0.up.weight", "layers.0.bias.table", "experts.weight")
    assert found == {"half.weight": -1, **dict.fromkeys(names, -2)}
    dense, packed = interop.open(source), interop.open(out)
    for name, axis in found.items():
        assert same(packed[name], eqq.quantize(dense[name], "nf4", axis=axis))


def test_what_is_beside(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, None, rules=[("half.*", "int8")])
    assert sorted(os.listdir(out)) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    checkpoint = interop.open(out)
    assert checkpoint.config == {"model_type": "test"}
    w = interop.open(source)["half.weight"]
    assert w.dtype == jnp.bfloat16
    assert same(checkpoint["half.weight"], eqq.quantize(w, "int8", axis=-1))
    name = "experts.weight"
    assert same(checkpoint[name], interop.open(source)[name])
    # As in JAX, without numbers of 64 bits.
    assert same(checkpoint["positions"], jnp.arange(4096).reshape(64, 64))


def test_64_bits(tmp_path):
    source, out = tmp_path / "a.safetensors", tmp_path / "out"
    files.save(source, {"w": np.asarray(normal(64, 64)), "i": np.array([2**40])})
    with pytest.raises(ValueError, match="'i'.*int64.*JAX_ENABLE_X64=1.*enable_x64"):
        convert(source, out)
    with jax.enable_x64(True):
        convert(source, out, fresh=True)
        assert interop.open(out)["i"][0] == 2**40


@pytest.mark.parametrize(
    "to, format",
    [
        ("gguf", eqq.formats.Q4_0()),
        ("mlx", _affine),
        ("compressed-tensors", eqq.Int8()),
    ],
)
def test_for_others(to, format, source, tmp_path):
    rules = [("layers.0.up.weight", format)]
    convert(source, tmp_path / "out", None, rules=rules, to=to, shard_size=60_000)
    names = os.listdir(tmp_path / "out")
    assert sum("-of-" in name for name in names) > 1
    first = next(name for name in names if "-00001-of-" in name)
    path = tmp_path / "out" if to != "gguf" else tmp_path / "out" / first
    checkpoint = interop.open(path)
    assert checkpoint.kind == to
    dense = interop.open(source)
    assert set(checkpoint) == set(dense)
    q = checkpoint["layers.0.up.weight"]
    assert same(q, eqq.quantize(dense["layers.0.up.weight"], format, axis=-1))
    assert same(checkpoint["half.weight"], dense["half.weight"])
    with pytest.raises(ValueError, match="layers.0.up.weight.*NF4.*cannot be written"):
        convert(source, tmp_path / "other", "nf4", to=to)
    assert not (tmp_path / "other.partial").exists()


@pytest.mark.thorough
def test_from_gguf(tmp_path):
    # Of the llama architecture, whose rows of queries and keys change places.
    model = llama.Llama(jr.key(0))
    arrays, metadata = llama.to_gguf(model, None)
    path = tmp_path / "model.gguf"
    half = {name: x.astype(jnp.float16) for name, x in arrays.items()}
    interop.write_gguf(path, half, metadata)
    packed = tmp_path / "q8_0.gguf"
    convert(path, packed, "q8_0", rules=[("output*", None)])
    expected = {
        name: x if x.ndim < 2 or name in ("output.weight", "token_embd.weight")
        else eqq.quantize(x, "q8_0", axis=-1)
        for name, x in half.items()
    }  # fmt: skip
    interop.write_gguf(tmp_path / "expected.gguf", expected, metadata)
    assert packed.read_bytes() == (tmp_path / "expected.gguf").read_bytes()

    # What is quantized stays so, or is quantized again.
    kept, again = tmp_path / "kept", tmp_path / "again"
    outcomes = convert(packed, kept, None)
    assert "quantized already" in {x.reason for x in outcomes}
    name = "blk.0.attn_q.weight"
    assert same(interop.open(kept)[name], interop.open(packed)[name])
    convert(packed, again, "nf4", requantize=True)
    w = interop.open(packed)[name].dequantize()
    assert same(interop.open(again)[name], eqq.quantize(w, "nf4", axis=-1))
    # And from a file of our own.
    convert(kept, tmp_path / "back.gguf", None)
    back, expected = interop.open(tmp_path / "back.gguf"), interop.open(packed)
    assert back.metadata == expected.metadata
    assert set(back) == set(expected)
    assert all(same(x, expected[name]) for name, x in back.items())


def test_mistakes(source, tmp_path):
    out = tmp_path / "out"
    mistakes: tuple[tuple[dict[str, Any], str], ...] = (
        (dict(rules=[("*.atention.*", "int8")]), "atention.*matches no array"),
        (dict(to="torch"), "`to`.*'torch'"),
        (dict(axis=0), "`axis`.*0"),
        (dict(axis=[("half.*", 1)]), "`axis`.*1"),
        (dict(axis=[("hlaf.*", -2)]), "hlaf.*matches no array"),
        (dict(shard_size=0), "`shard_size`"),
        (dict(format="int9"), "int9"),
    )
    for kwargs, words in mistakes:
        with pytest.raises(ValueError, match=words):
            convert(source, out, **kwargs)
    with pytest.raises(ValueError, match="out.gguf.*'mlx'"):
        convert(source, tmp_path / "out.gguf", to="mlx")
    with pytest.raises(ValueError, match="`shard_size`"):
        convert(source, tmp_path / "out.safetensors", shard_size=10)
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="missing"):
        convert(tmp_path / "missing", out)


def test_not_finite(tmp_path):
    w = np.ones((64, 64), np.float32)
    w[3, 5] = np.inf
    files.save(tmp_path / "a.safetensors", {"w": w})
    with pytest.raises(ValueError, match="'w'.*finite. 1 of its 4096 numbers.*rule"):
        convert(tmp_path / "a.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()
