import functools as ft
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .._model import attend
from ._config import Config


# The keys and values of all layers at the positions so far.
Cache = Float[Array, "l 2 h s c"]
_Layer = TypeVar("_Layer", bound=Callable[..., Any])


class Llama(eqx.Module):
    """A transformer of the Llama, Mistral, Qwen 2 and Qwen 3 families, made of ordinary
    `eqx.nn` layers, without any code for quantization. Its arrays have Hugging Face's
    names. Its layers are stacked and scanned, or a list, if their formats differ.
    (Touvron et al., 2023.)
    """

    embed_tokens: eqx.nn.Embedding
    layers: "Layer | list[Layer]"  # every array of a stack has an axis of layers
    norm: eqx.nn.RMSNorm
    lm_head: eqx.nn.Linear | None  # `None`: the embedding is the last matrix, too
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        ekey, lkey, hkey = jr.split(key, 3)
        size, keys = (config.vocabulary, config.width), jr.split(lkey, config.depth)
        self.embed_tokens = eqx.nn.Embedding(*size, key=ekey)
        self.layers = eqx.filter_vmap(lambda key: Layer(config, key=key))(keys)
        self.norm = _norm(config.width, config)
        self.lm_head = None if config.is_tied else _linear(*size[::-1], key=hkey)
        self.config = config

    def __call__(self, tokens: Int[Array, " t"]) -> Float[Array, "t v"]:
        """Returns the logits of the token that follows each token."""
        return self.step(tokens, jnp.asarray(0), None)[0]

    def step(
        self, tokens: Int[Array, " t"], start: Int[Array, ""], past: Cache | None
    ) -> tuple[Float[Array, "t v"], Cache | None]:
        """Returns the logits for tokens at the positions from `start`, and the updated
        cache. `past` has the keys and values of earlier tokens."""
        x = jax.vmap(self.embed_tokens)(tokens)
        x, past = through(self.layers, x, start, past)
        x = jax.vmap(self.norm)(x)
        if self.lm_head is None:
            return x @ self.embed_tokens.weight.T, past
        return jax.vmap(self.lm_head)(x), past

    def empty_past(self, size: int) -> Cache:
        """Returns an empty cache of keys and values for `size` positions."""
        c = self.config
        return jnp.zeros((c.depth, 2, c.key_heads, size, c.head_size))

    def stacked(self) -> "Llama":
        """Returns the same model with its layers in a stack. They should have the same
        structure."""
        return eqx.tree_at(lambda m: m.layers, self, stacked(self.layers))


class Layer(eqx.Module):
    input_layernorm: eqx.nn.RMSNorm
    self_attn: "Attention"
    post_attention_layernorm: eqx.nn.RMSNorm
    mlp: "MLP"

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        akey, mkey = jr.split(key)
        self.input_layernorm = _norm(config.width, config)
        self.self_attn = Attention(config, key=akey)
        self.post_attention_layernorm = _norm(config.width, config)
        self.mlp = MLP(config, key=mkey)

    def __call__(self, x: Float[Array, "t d"], start, past):
        y, past = self.self_attn(jax.vmap(self.input_layernorm)(x), start, past)
        x = x + y
        return x + jax.vmap(self.mlp)(jax.vmap(self.post_attention_layernorm)(x)), past


class Attention(eqx.Module):
    """Causal attention, in which several heads of queries share a head of keys and
    values."""

    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    q_norm: eqx.nn.RMSNorm | eqx.nn.Identity
    k_norm: eqx.nn.RMSNorm | eqx.nn.Identity
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        qkey, kkey, vkey, okey = jr.split(key, 4)
        size = config.head_size
        wide, few = config.heads * size, config.key_heads * size
        linear = ft.partial(_linear, config.width, use_bias=config.has_biases)
        self.q_proj = linear(wide, key=qkey)
        self.k_proj = linear(few, key=kkey)
        self.v_proj = linear(few, key=vkey)
        self.o_proj = _linear(wide, config.width, key=okey)
        norm = _norm if config.has_head_norms else eqx.nn.Identity
        self.q_norm, self.k_norm = norm(size, config), norm(size, config)
        self.config = config

    def __call__(self, x: Float[Array, "t d"], start, past):
        layers = (self.q_proj, self.k_proj, self.v_proj)
        shape = (len(x), -1, self.config.head_size)
        q, k, v = [jax.vmap(f)(x).reshape(shape).swapaxes(0, 1) for f in layers]
        q, k = jax.vmap(jax.vmap(self.q_norm))(q), jax.vmap(jax.vmap(self.k_norm))(k)
        positions = start + jnp.arange(len(x))
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        if past is not None:
            new = jnp.stack([k, v]).astype(past.dtype)
            past = jax.lax.dynamic_update_slice_in_dim(past, new, start, 2)
            k, v = past.astype(x.dtype)
        mask = jnp.arange(k.shape[1])[None, :] <= positions[:, None]
        # Heads of queries that share a head of keys are next to each other.
        q = q.reshape(len(k), -1, *q.shape[1:])
        attend_all = jax.vmap(attend, in_axes=(0, None, None, None))
        y = jax.vmap(attend_all, in_axes=(0, 0, 0, None))(q, k, v, mask)
        return jax.vmap(self.o_proj)(jnp.moveaxis(y, 2, 0).reshape(len(x), -1)), past

    def _rotated(self, x, positions):
        # Rotary embeddings rotate the first half of each head against the second.
        angles = positions.astype(jnp.float32)[:, None] * self.config.frequencies[None]
        cos, sin = (f(angles).astype(x.dtype)[None] for f in (jnp.cos, jnp.sin))
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class MLP(eqx.Module):
    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        gkey, ukey, dkey = jr.split(key, 3)
        self.gate_proj = _linear(config.width, config.hidden, key=gkey)
        self.up_proj = _linear(config.width, config.hidden, key=ukey)
        self.down_proj = _linear(config.hidden, config.width, key=dkey)

    def __call__(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


_linear = ft.partial(eqx.nn.Linear, use_bias=False)


def _norm(size, config):
    return eqx.nn.RMSNorm(size, eps=config.eps, use_bias=False)


def through(
    layers: _Layer | list[_Layer],
    x: Float[Array, "t d"],
    start: Any,
    past: Cache | None,
) -> tuple[Float[Array, "t d"], Cache | None]:
    """Calls layers one after another, `x, past[i] = layer(x, start, past[i])`. A stack,
    whose arrays have a leading axis of layers, is scanned; a list is unrolled."""
    if not isinstance(layers, list):
        arrays, static = eqx.partition(layers, eqx.is_array)
        layer = lambda x, a: eqx.combine(a[0], static)(x, start, a[1])
        return jax.lax.scan(layer, x, (arrays, past))
    for i, layer in enumerate(layers):
        x, new = layer(x, start, None if past is None else past[i])
        past = None if past is None else past.at[i].set(new)
    return x, past


def stacked(layers: _Layer | list[_Layer]) -> _Layer:
    """Stacks layers, which should have the same structure."""
    if not isinstance(layers, list):
        return layers
    if len({jax.tree.structure(layer) for layer in layers}) > 1:
        raise ValueError(
            "Layers should be alike to be a stack. Some arrays have another format in "
            "some layers: `eqquant.tree_dequantize(model).stacked()`."
        )
    arrays, static = zip(*(eqx.partition(layer, eqx.is_array) for layer in layers))
    return eqx.combine(jax.tree.map(lambda *a: jnp.stack(a), *arrays), static[0])


def listed(layers: _Layer, number: int) -> list[_Layer]:
    """Returns the skeletons of the layers in the skeleton of a stack."""
    first = lambda layers: jax.tree.map(lambda a: a[0], layers)
    return [eqx.filter_eval_shape(first, layers) for _ in range(number)]
