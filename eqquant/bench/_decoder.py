import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..demo import attend, rotate


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a transformer, and the number of positions that it attends to."""

    vocabulary: int = 32000
    width: int = 768
    hidden: int = 2048
    depth: int = 12
    heads: int = 12
    positions: int = 128


class Decoder(eqx.Module):
    """A transformer of Llama's architecture that reads and generates text."""

    embedding: eqx.nn.Embedding
    blocks: list["Block"]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, size: Size, *, key: PRNGKeyArray):
        self.embedding = eqx.nn.Embedding(size.vocabulary, size.width, key=key)
        self.blocks = [Block(size, key=key) for _ in range(size.depth)]
        self.norm = eqx.nn.RMSNorm(size.width, use_bias=False)
        self.head = eqx.nn.Linear(size.width, size.vocabulary, use_bias=False, key=key)

    def __call__(
        self,
        token: Int[Array, ""],
        position: Int[Array, ""],
        past: list[Float[Array, "2 h s c"]],
    ) -> tuple[Float[Array, " v"], list[Float[Array, "2 h s c"]]]:
        """Returns the logits of the next token, and the cache with the keys and values
        of this one."""
        return self.read(token[None], position, past)

    def read(
        self,
        tokens: Int[Array, " t"],
        start: Int[Array, ""],
        past: list[Float[Array, "2 h s c"]],
    ) -> tuple[Float[Array, " v"], list[Float[Array, "2 h s c"]]]:
        """Reads several tokens, at the positions from `start`. Returns the logits of
        the next token, and the cache."""
        x = jax.vmap(self.embedding)(tokens)
        new = []
        for block, cache in zip(self.blocks, past):
            x, cache = block(x, start, cache)
            new.append(cache)
        return self.head(self.norm(x[-1])), new


class Block(eqx.Module):
    norm1: eqx.nn.RMSNorm
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    out: eqx.nn.Linear
    norm2: eqx.nn.RMSNorm
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, size: Size, *, key: PRNGKeyArray):
        def linear(old, new):
            return eqx.nn.Linear(old, new, use_bias=False, key=key)

        self.norm1 = eqx.nn.RMSNorm(size.width, use_bias=False)
        self.q = linear(size.width, size.width)
        self.k = linear(size.width, size.width)
        self.v = linear(size.width, size.width)
        self.out = linear(size.width, size.width)
        self.norm2 = eqx.nn.RMSNorm(size.width, use_bias=False)
        self.gate = linear(size.width, size.hidden)
        self.up = linear(size.width, size.hidden)
        self.down = linear(size.hidden, size.width)
        self.heads = size.heads

    def __call__(
        self,
        x: Float[Array, "t d"],
        start: Int[Array, ""],
        past: Float[Array, "2 h s c"],
    ) -> tuple[Float[Array, "t d"], Float[Array, "2 h s c"]]:
        y = jax.vmap(self.norm1)(x)
        q, k, v = [
            jax.vmap(f)(y).reshape(len(x), self.heads, -1).swapaxes(0, 1)
            for f in (self.q, self.k, self.v)
        ]
        positions = start + jnp.arange(len(x))
        q, k = rotate(q, positions), rotate(k, positions)
        new = jnp.stack([k, v]).astype(past.dtype)
        past = lax.dynamic_update_slice_in_dim(past, new, start, 2)
        mask = jnp.arange(past.shape[2])[None, :] <= positions[:, None]
        k, v = past.astype(x.dtype)
        y = jax.vmap(attend, in_axes=(0, 0, 0, None))(q, k, v, mask)
        x = x + jax.vmap(self.out)(y.swapaxes(0, 1).reshape(len(x), -1))
        y = jax.vmap(self.norm2)(x)
        y = jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
        return x + jax.vmap(self.down)(y), past


def random_decoder(size: Size, seed: int) -> Decoder:
    """Returns a transformer whose norms are ones, and whose weights are normally
    distributed, with a variance that preserves the magnitude of activations."""
    rng = np.random.default_rng(seed)

    def fill(a):
        if a.ndim == 1:
            return jnp.ones(a.shape, a.dtype)
        w = rng.standard_normal(a.shape, np.float32)
        return jnp.asarray(w / np.float32(a.shape[-1] ** 0.5))

    make = lambda: Decoder(size, key=jax.random.key(0))
    return jtu.tree_map(fill, eqx.filter_eval_shape(make))


def empty_past(size: Size, dtype: Any = jnp.float32) -> list[Float[Array, "2 h s c"]]:
    """Returns the empty cache of keys and values of each layer, in `dtype`."""
    shape = (2, size.heads, size.positions, size.width // size.heads)
    return [jnp.zeros(shape, dtype) for _ in range(size.depth)]
