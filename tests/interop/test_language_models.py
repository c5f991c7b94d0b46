"""Language models from files into a model with other names, whose layers are stacked
and whose projections are one: logits against those of transformers, which
`by_transformers.py` stored. And the layouts of all libraries into such a model."""

import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant.interop import Join, load_into

from . import families, files
from .decoder import Decoder


data = pathlib.Path(__file__).parents[1] / "data"
_layer = "model.layers.{i}"
_mlp = f"{_layer}.mlp"
# For all families, from the names of Hugging Face.
rename = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    f"{_layer}.input_layernorm.weight": "layers.norms.0.weight",
    f"{_layer}.post_attention_layernorm.weight": "layers.norms.1.weight",
    Join(
        *(f"{_layer}.self_attn.{x}_proj.{{kind}}" for x in "qkv")
    ): "layers.qkv.{kind}",
    f"{_layer}.self_attn.o_proj.weight": "layers.output.weight",
    f"{_layer}.self_attn.q_norm.weight": "layers.of_heads.0.weight",
    f"{_layer}.self_attn.k_norm.weight": "layers.of_heads.1.weight",
    f"{_mlp}.gate.weight": "layers.router.weight",
    Join(*(f"{_mlp}.{x}_proj.weight" for x in ("gate", "up"))): "layers.gate_up.weight",
    f"{_mlp}.down_proj.weight": "layers.down.weight",
    # Experts, each an array or all of a layer.
    Join(
        *(f"{_mlp}.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up"))
    ): "layers.gate_up.weight",
    f"{_mlp}.experts.{{e}}.down_proj.weight": "layers.down.weight",
    Join(
        *(f"{_mlp}.experts.{x}_proj.weight" for x in ("gate", "up"))
    ): "layers.gate_up.weight",
    f"{_mlp}.experts.down_proj.weight": "layers.down.weight",
}


def _skeleton(family):
    return eqx.filter_eval_shape(Decoder, family, jax.random.key(0))


def _write_shards(folder, arrays):
    # In two files, and an index.
    names = list(arrays)
    weight_map = {}
    for i in range(2):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        part = {name: arrays[name] for name in names[i::2]}
        files.save(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def _to_gguf(path, family, arrays):
    """As llama.cpp has it: its own names, rows of queries and keys that the llama
    architecture permutes, and the experts of a layer in one array."""
    whole = {}
    for name, w in arrays.items():
        before, _, expert = name.partition(".experts.")
        if expert:
            _, _, rest = expert.partition(".")
            whole.setdefault(f"{before}.experts.{rest}", []).append(w)
        else:
            whole[name] = w
    whole = {name: jnp.asarray(w) for name, w in whole.items()}
    whole = {name: _quantized(name, w) for name, w in whole.items()}
    architecture = family.lower()
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.attention.head_count": families.heads,
        f"{architecture}.attention.head_count_kv": families.few,
    }
    interop.write_gguf(path, whole, metadata, rename="llama")


def _quantized(name, w):
    w = jnp.asarray(w)
    if not name.endswith("_proj.weight"):
        return w
    return eqq.quantize(w, eqq.formats.Q8_0(), axis=-1)


@eqx.filter_jit
def _logits(*models):
    return [model(jnp.asarray(families.tokens)) for model in models]


@pytest.mark.examples(2)
@pytest.mark.parametrize("family", families.families)
def test_logits(family, tmp_path):
    arrays = families.arrays(family)
    _write_shards(tmp_path, arrays)
    skeleton = _skeleton(family)
    with interop.open(tmp_path) as checkpoint:
        model = load_into(skeleton, checkpoint, rename)
    _to_gguf(tmp_path / "model.gguf", family, arrays)
    with interop.open(tmp_path / "model.gguf") as checkpoint:
        assert any(name.startswith("blk.") for name in checkpoint)
        packed = load_into(skeleton, checkpoint, ["llama", rename])
    assert packed.layers.qkv.weight.format == eqq.formats.Q8_0()
    # The same numbers, dequantized before they were loaded.
    dense = {name: _quantized(name, w) for name, w in arrays.items()}
    dense = load_into(skeleton, eqq.tree_dequantize(dense), rename)
    logits, of_packed, of_dense = _logits(model, packed, dense)
    with np.load(data / "transformers.npz") as stored:
        np.testing.assert_allclose(logits, stored[family], rtol=0, atol=1e-4)
    np.testing.assert_allclose(of_packed, of_dense, rtol=0, atol=1e-4)
    # Which are not those of the other model.
    assert np.max(np.abs(of_packed - logits)) > 1e-3


# bitsandbytes has one for all arrays.
_table = np.linspace(-1, 1, 256, dtype=np.float32)
layouts = {
    "gptq": lambda **at: files.gptq(64, 96, **at),
    "gptq-3": lambda **at: files.gptq(64, 96, 3, version=2, **at),
    "awq": lambda **at: files.awq(64, 96, **at),
    "bitsandbytes": lambda name, **at: files.bitsandbytes(name=_weight(name), **at),
    "bitsandbytes-nested": lambda name, **at: files.bitsandbytes(
        kind="fp4", nested=256, table=_table, name=_weight(name), **at
    ),
    "bitsandbytes8": lambda **at: files.bitsandbytes8(64, 96, **at),
    "compressed-tensors": lambda **at: files.compressed(64, 96, symmetric=False, **at),
    "compressed-tensors-int8": lambda **at: files.compressed8((64, 3), 64, 96, **at),
    "compressed-tensors-fp8": lambda **at: files.compressed8(
        (), 64, 96, kind="float", **at
    ),
    "nvfp4": lambda **at: files.nvfp4(64, 96, **at),
    "bitnet": lambda **at: files.bitnet(64, 96, **at),
}


def _weight(name):
    return f"{name}.weight"


@pytest.mark.examples(5)
@pytest.mark.parametrize("layout", layouts)
def test_layouts(layout, tmp_path):
    tensors, dense = {}, {}
    for i in range(2):
        for j, x in enumerate(("gate", "up")):
            made = layouts[layout](seed=2 * i + j, name=f"layers.{i}.{x}")
            tensors |= made[0]
            dense |= made[2]
    files.save(tmp_path / "model.safetensors", tensors, made[1])
    rules = {Join("layers.{i}.gate.weight", "layers.{i}.up.weight"): "w"}
    skeleton = {"w": jax.ShapeDtypeStruct((2, 128, 96), jnp.float32)}
    with interop.open(tmp_path) as checkpoint:
        assert set(checkpoint) == set(dense)
        q = load_into(skeleton, checkpoint, rules)["w"]
        of_file = sum(checkpoint.entries[name].read().nbytes for name in dense)
    # What all rows shared, one number or one table, is not repeated more than that.
    assert q.nbytes <= of_file + 4 * 2 * 128
    w = load_into(skeleton, dense, rules)["w"]
    np.testing.assert_allclose(q.dequantize(), w, rtol=2e-7, atol=1e-7)


def test_libraries(tmp_path):
    # MLX, by its writer; and torchao, from its sample, each array twice.
    parts = {
        f"{x}.weight": eqq.quantize(jnp.asarray(w), eqq.Int(4, 32, "minimum"), axis=-1)
        for x, w in zip(
            "ab", np.random.default_rng(0).standard_normal((2, 32, 64), "f4")
        )
    }
    interop.write_mlx(tmp_path, parts)
    rules = {Join("a.weight", "b.weight"): "w"}
    skeleton = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    q = load_into(skeleton, interop.open(tmp_path), rules)["w"]
    dense = [parts[f"{x}.weight"].dequantize() for x in "ab"]
    np.testing.assert_array_equal(q.dequantize(), np.concatenate(dense))
    with interop.open(data / "torchao.safetensors") as checkpoint:
        for name, entry in checkpoint.entries.items():
            if entry.format is None:
                continue
            n, k = entry.shape
            skeleton = {"w": jax.ShapeDtypeStruct((2 * n, k), entry.dtype)}
            again = [{name: ("a", "b"), "*": None}, {Join("a", "b"): "w"}]
            q = load_into(skeleton, checkpoint, again)["w"]
            one = checkpoint[name]
            assert q.format == one.format and q.shape == (2 * n, k)
            for key, a in q.layout.to_rows(q.stored).items():
                first = np.asarray(one.layout.to_rows(one.stored)[key])
                first = np.broadcast_to(first, (n, first.shape[-1]))
                twice = np.broadcast_to(a, (2 * n, a.shape[-1]))
                np.testing.assert_array_equal(twice, np.concatenate([first, first]))
