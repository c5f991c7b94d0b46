"""A small transformer with the names that Hugging Face has for Llama's, and its arrays
as a file of llama.cpp has them."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqquant as eqq

from .llama_names import matrices, norms


# Rows of 256 numbers, as `Q4_K` has them.
size, wide, vocabulary, depth = 256, 512, 32, 1
heads = {"q": 4, "k": 2}
_head = size // heads["q"]


def _linear(n_in, n_out, key):
    return eqx.nn.Linear(n_in, n_out, use_bias=False, key=key)


class Attention(eqx.Module):
    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 4)
        few = heads["k"] * _head
        self.q_proj = _linear(size, size, keys[0])
        self.k_proj = _linear(size, few, keys[1])
        self.v_proj = _linear(size, few, keys[2])
        self.o_proj = _linear(size, size, keys[3])

    def __call__(self, x):
        q, k, v = [
            jax.vmap(layer)(x).reshape(len(x), -1, _head)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        y = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        return jax.vmap(self.o_proj)(y.reshape(len(x), -1))


def _rotated(x):
    # The first half of each head against the second.
    frequencies = 10.0 ** -jnp.linspace(0, 4, _head // 2)
    angle = jnp.arange(len(x), dtype=x.dtype)[:, None, None] * frequencies[None, None]
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class MLP(eqx.Module):
    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.gate_proj = _linear(size, wide, keys[0])
        self.up_proj = _linear(size, wide, keys[1])
        self.down_proj = _linear(wide, size, keys[2])

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(eqx.Module):
    input_layernorm: eqx.nn.RMSNorm
    self_attn: Attention
    post_attention_layernorm: eqx.nn.RMSNorm
    mlp: MLP

    def __init__(self, key):
        keys = jr.split(key)
        self.input_layernorm = eqx.nn.RMSNorm(size, use_bias=False)
        self.self_attn = Attention(keys[0])
        self.post_attention_layernorm = eqx.nn.RMSNorm(size, use_bias=False)
        self.mlp = MLP(keys[1])

    def __call__(self, x):
        x = x + self.self_attn(jax.vmap(self.input_layernorm)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.post_attention_layernorm)(x))


class Llama(eqx.Module):
    embed_tokens: eqx.nn.Embedding
    layers: list[Layer]
    norm: eqx.nn.RMSNorm
    lm_head: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, depth + 2)
        self.embed_tokens = eqx.nn.Embedding(vocabulary, size, key=keys[0])
        self.layers = [Layer(key) for key in keys[2:]]
        self.norm = eqx.nn.RMSNorm(size, use_bias=False)
        self.lm_head = _linear(size, vocabulary, keys[1])

    def __call__(self, tokens):
        x = jax.vmap(self.embed_tokens)(tokens)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.lm_head)(jax.vmap(self.norm)(x))


def _child(node, key):
    return node[int(key)] if key.isdigit() else getattr(node, key)


def to_gguf(model, format):
    """The arrays by their names in a file of llama.cpp, the matrices quantized, or of a
    dtype, and the metadata."""
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    for i in range(depth):
        names |= {
            f"layers.{i}.{k}": f"blk.{i}.{name}"
            for k, name in (matrices | norms).items()
        }

    arrays = {}
    for path, name in names.items():
        w = ft.reduce(_child, path.split("."), model).weight
        if w.ndim == 2 and isinstance(format, eqq.AbstractFormat):
            w = eqq.quantize(w, format, axis=-1)
        elif w.ndim == 2 and format is not None:
            w = w.astype(format)
        arrays[f"{name}.weight"] = w
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": depth,
        "llama.embedding_length": size,
        "llama.attention.head_count": heads["q"],
        "llama.attention.head_count_kv": heads["k"],
        "tokenizer.ggml.tokens": [chr(97 + i) for i in range(vocabulary)],
    }
    return arrays, metadata
