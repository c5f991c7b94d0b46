"""Writes and reads the model of `eqquant bench --llama`: in GGUF, which llama.cpp
reads, too, or in eqquant's own files for formats that GGUF lacks."""

import json
import pathlib
import tempfile

import equinox as eqx
import jax.random as jr

from ..._tree import tree_quantize
from ...formats import AbstractFormat
from ...interop import load, load_into, open, save, write_gguf
from .._decoder import Decoder, Size


_block = {
    "norm1": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Maps the names of a `Decoder` to Hugging Face's names.
_names = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
} | {
    f"blocks.*.{ours}.weight": f"model.layers.*.{theirs}.weight"
    for ours, theirs in _block.items()
}


def write_model(
    folder: pathlib.Path, dense: Decoder, size: Size, format: AbstractFormat | None
) -> pathlib.Path:
    """Quantizes a model, except for its embedding, and writes it to a file."""
    model = dense
    if format is not None:
        model = eqx.filter_jit(tree_quantize)(dense, format)
    name = "float32" if format is None else type(format).__name__
    path = folder / f"{name}.gguf"
    try:
        with tempfile.TemporaryDirectory() as config:
            text = json.dumps(_config(size))
            pathlib.Path(config, "config.json").write_text(text, "utf-8")
            own = {"tokenizer.ggml.model": "none"}
            write_gguf(path, model, own, rename=_names, config=config)
    except ValueError:
        path = path.with_suffix(".safetensors")
        save(path, model)
    return path


def read_model(path: pathlib.Path, size: Size) -> Decoder:
    """Reads a model from its file."""
    make = lambda: Decoder(size, key=jr.key(0))
    if path.suffix != ".gguf":
        return load(path, like=eqx.filter_eval_shape(make))
    back = {theirs: ours for ours, theirs in _names.items()}
    with open(path) as checkpoint:
        skeleton = eqx.filter_eval_shape(make)
        return load_into(skeleton, checkpoint, rename=["llama", back])


def _config(size):
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": size.width,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "hidden_act": "silu",
    }
