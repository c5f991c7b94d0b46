import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8


# The keys and values of the positions so far, of one layer.
Past = Float[Array, "2 s h c"]


class LanguageModel(eqx.Module):
    """A transformer over bytes, of `eqx.nn` layers: it knows nothing of quantization."""

    embedding: eqx.nn.Embedding
    blocks: list["Block"]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, width: int, depth: int, heads: int, *, key: PRNGKeyArray):
        ekey, hkey, *bkeys = jr.split(key, 2 + depth)
        self.embedding = eqx.nn.Embedding(256, width, key=ekey)
        self.blocks = [Block(width, heads, key=bkey) for bkey in bkeys]
        self.norm = eqx.nn.RMSNorm(width, use_bias=False)
        self.head = eqx.nn.Linear(width, 256, use_bias=False, key=hkey)

    def __call__(self, text: UInt8[Array, " t"]) -> Float[Array, "t 256"]:
        """The logits of the byte after each."""
        logits, _ = self.step(text, 0, [None] * len(self.blocks))
        return logits

    def step(
        self,
        text: UInt8[Array, " t"],
        start: int | Int[Array, ""],
        past: list[Past | None],
    ) -> tuple[Float[Array, "t 256"], list[Past | None]]:
        """The same, for bytes at positions from `start` on, after those in `past`."""
        x = jax.vmap(self.embedding)(text)
        new = []
        for block, block_past in zip(self.blocks, past, strict=True):
            x, block_past = block(x, start, block_past)
            new.append(block_past)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x)), new

    def empty_past(self, size: int) -> list[Past]:
        """To start with: room for `size` positions."""
        width = self.head.in_features
        heads = [block.attention.heads for block in self.blocks]
        return [jnp.zeros((2, size, h, width // h)) for h in heads]


class Block(eqx.Module):
    norm1: eqx.nn.RMSNorm
    attention: "Attention"
    norm2: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        akey, ukey, dkey = jr.split(key, 3)
        self.norm1 = eqx.nn.RMSNorm(width, use_bias=False)
        self.attention = Attention(width, heads, key=akey)
        self.norm2 = eqx.nn.RMSNorm(width, use_bias=False)
        self.up = eqx.nn.Linear(width, 4 * width, use_bias=False, key=ukey)
        self.down = eqx.nn.Linear(4 * width, width, use_bias=False, key=dkey)

    def __call__(
        self, x: Float[Array, "t d"], start: int | Int[Array, ""], past: Past | None
    ) -> tuple[Float[Array, "t d"], Past | None]:
        y, past = self.attention(jax.vmap(self.norm1)(x), start, past)
        x = x + y
        # Squared, as the derivative of a GELU takes XLA longer than the products do.
        y = jnp.square(jax.nn.relu(jax.vmap(self.up)(jax.vmap(self.norm2)(x))))
        return x + jax.vmap(self.down)(y), past


class Attention(eqx.Module):
    """Causal attention, with rotary position embeddings."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        qkey, okey = jr.split(key)
        self.qkv = eqx.nn.Linear(width, 3 * width, use_bias=False, key=qkey)
        self.out = eqx.nn.Linear(width, width, use_bias=False, key=okey)
        self.heads = heads

    def __call__(
        self, x: Float[Array, "t d"], start: int | Int[Array, ""], past: Past | None
    ) -> tuple[Float[Array, "t d"], Past | None]:
        t, d = x.shape
        positions = start + jnp.arange(t)
        qkv = jax.vmap(self.qkv)(x).reshape(t, 3, self.heads, -1)
        q = rotate(qkv[:, 0], positions)
        k = rotate(qkv[:, 1], positions)
        v = qkv[:, 2]
        if past is not None:
            past = lax.dynamic_update_slice_in_dim(past, jnp.stack([k, v]), start, 1)
            k, v = past
        mask = jnp.arange(k.shape[0])[None, :] <= positions[:, None]
        y = jax.nn.dot_product_attention(q, k, v, mask=mask[None])
        return jax.vmap(self.out)(y.reshape(t, d)), past


def rotate(
    x: Float[Array, "t h c"], positions: Int[Array, " t"]
) -> Float[Array, "t h c"]:
    """Rotary position embeddings: each pair of numbers is turned by an angle that grows
    with the position, so that products depend on distances alone."""
    half = x.shape[-1] // 2
    frequencies = 1000.0 ** (-jnp.arange(half) / half)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
