"""A language model as somebody may write it, for all `families`: its layers are stacked
and scanned, its projections of queries, keys and values are one, and so are those of
gates."""

import equinox as eqx
import jax
import jax.numpy as jnp

from .families import (
    chosen,
    depth,
    experts,
    few,
    head,
    heads,
    hidden,
    narrow,
    vocabulary,
    wide,
)


class Decoder(eqx.Module):
    embedding: eqx.nn.Embedding
    layers: "Layer"
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear | None

    def __init__(self, family, key):
        self.embedding = eqx.nn.Embedding(vocabulary, hidden, key=key)
        keys = jax.random.split(key, depth)
        self.layers = eqx.filter_vmap(lambda key: Layer(family, key))(keys)
        self.norm = _norm(hidden)
        self.head = None if family == "Qwen3" else _linear(hidden, vocabulary, key)

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        step = lambda x, layer: (eqx.combine(layer, static)(x), None)
        x, _ = jax.lax.scan(step, x, arrays)
        x = jax.vmap(self.norm)(x)
        if self.head is None:
            return x @ self.embedding.weight.T
        return jax.vmap(self.head)(x)


class Layer(eqx.Module):
    norms: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]
    qkv: eqx.nn.Linear
    output: eqx.nn.Linear
    of_heads: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm] | None
    router: eqx.nn.Linear | None
    # Of experts, with an axis in front.
    gate_up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, family, key):
        self.norms = (_norm(hidden), _norm(hidden))
        self.qkv = eqx.nn.Linear(
            hidden, (heads + 2 * few) * head, use_bias=family == "Qwen2", key=key
        )
        self.output = _linear(heads * head, hidden, key)
        has_norms = family.startswith("Qwen3")
        self.of_heads = (_norm(head), _norm(head)) if has_norms else None
        if family == "Qwen3Moe":
            keys = jax.random.split(key, experts)
            self.router = _linear(hidden, experts, key)
            several = lambda n, m: eqx.filter_vmap(lambda key: _linear(n, m, key))(keys)
            self.gate_up = several(hidden, 2 * narrow)
            self.down = several(narrow, hidden)
        else:
            self.router = None
            self.gate_up = _linear(hidden, 2 * wide, key)
            self.down = _linear(wide, hidden, key)

    def __call__(self, x):
        y = jax.vmap(self.qkv)(jax.vmap(self.norms[0])(x))
        q, k, v = jnp.split(y.reshape(len(x), -1, head), [heads, heads + few], axis=1)
        if self.of_heads is not None:
            q, k = [
                jax.vmap(jax.vmap(norm))(a)
                for norm, a in zip(self.of_heads, (q, k), strict=True)
            ]
        y = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x = x + jax.vmap(self.output)(y.reshape(len(x), -1))
        return x + jax.vmap(self._mlp)(jax.vmap(self.norms[1])(x))

    def _mlp(self, x):
        if self.router is None:
            gate, up = jnp.split(self.gate_up(x), 2)
            return self.down(jax.nn.silu(gate) * up)
        shares, which = jax.lax.top_k(jax.nn.softmax(self.router(x)), chosen)
        # (Of all experts, since there are few.)
        y = jax.vmap(lambda w: w @ x)(self.gate_up.weight)
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.vmap(lambda w, x: w @ x)(self.down.weight, jax.nn.silu(gate) * up)
        return (shares / jnp.sum(shares)) @ y[which]


def _norm(size):
    return eqx.nn.RMSNorm(size, eps=1e-5, use_bias=False)


def _linear(n_in, n_out, key):
    return eqx.nn.Linear(n_in, n_out, use_bias=False, key=key)


def _rotated(x):
    # The first half of each head against the second.
    frequencies = 10000.0 ** -(jnp.arange(0, head, 2, dtype=x.dtype) / head)
    angle = jnp.arange(len(x), dtype=x.dtype)[:, None, None] * frequencies[None, None]
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
