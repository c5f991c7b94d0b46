import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8


# The keys and values of one layer at the positions so far.
Past = Float[Array, "2 h s c"]


class LanguageModel(eqx.Module):
    """A transformer over bytes, made of ordinary `eqx.nn` layers, without any code for
    quantization."""

    embedding: eqx.nn.Embedding
    blocks: "Block"  # a stack: every array has a leading axis of layers
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear
    depth: int = eqx.field(static=True)

    def __init__(self, width: int, depth: int, heads: int, *, key: PRNGKeyArray):
        ekey, bkey, hkey = jr.split(key, 3)
        self.embedding = eqx.nn.Embedding(256, width, key=ekey)
        make = eqx.filter_vmap(lambda key: Block(width, heads, key=key))
        self.blocks = make(jr.split(bkey, depth))
        self.norm = eqx.nn.RMSNorm(width, use_bias=False)
        self.head = eqx.nn.Linear(width, 256, use_bias=False, key=hkey)
        self.depth = depth

    def __call__(self, text: UInt8[Array, " t"]) -> Float[Array, "t 256"]:
        """Returns the logits of the byte that follows each byte."""
        logits, _ = self.step(text, jnp.asarray(0), None)
        return logits

    def step(
        self,
        text: UInt8[Array, " t"],
        start: Int[Array, ""],
        past: Float[Array, "l 2 h s c"] | None,
    ) -> tuple[Float[Array, "t 256"], Float[Array, "l 2 h s c"] | None]:
        """Returns the logits for bytes at the positions from `start`, and the updated
        cache. `past` has the keys and values of earlier bytes."""
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def layer(x, layer):
            arrays, past = layer
            return eqx.combine(arrays, static)(x, start, past)

        x = jax.vmap(self.embedding)(text)
        x, past = lax.scan(layer, x, (arrays, past))
        return jax.vmap(self.head)(jax.vmap(self.norm)(x)), past

    def empty_past(self, size: int) -> Float[Array, "l 2 h s c"]:
        """Returns an empty cache of keys and values for `size` positions."""
        heads = self.blocks.attention.heads
        head_size = self.embedding.embedding_size // heads
        return jnp.zeros((self.depth, 2, heads, size, head_size))


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
        self, x: Float[Array, "t d"], start: Int[Array, ""], past: Past | None
    ) -> tuple[Float[Array, "t d"], Past | None]:
        y, past = self.attention(jax.vmap(self.norm1)(x), start, past)
        x = x + y
        # A squared ReLU, since XLA:CPU is slow at the derivative of a GELU.
        y = jnp.square(jax.nn.relu(jax.vmap(self.up)(jax.vmap(self.norm2)(x))))
        return x + jax.vmap(self.down)(y), past


class Attention(eqx.Module):
    """Causal attention with rotary position embeddings."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        qkey, okey = jr.split(key)
        self.qkv = eqx.nn.Linear(width, 3 * width, use_bias=False, key=qkey)
        self.out = eqx.nn.Linear(width, width, use_bias=False, key=okey)
        self.heads = heads

    def __call__(
        self, x: Float[Array, "t d"], start: Int[Array, ""], past: Past | None
    ) -> tuple[Float[Array, "t d"], Past | None]:
        t, d = x.shape
        positions = start + jnp.arange(t)
        qkv = jax.vmap(self.qkv)(x).reshape(t, 3, self.heads, -1)
        q, k, v = jnp.moveaxis(qkv, 0, 2)
        q = rotate(q, positions)
        k = rotate(k, positions)
        if past is not None:
            past = lax.dynamic_update_slice_in_dim(past, jnp.stack([k, v]), start, 2)
            k, v = past
        mask = jnp.arange(k.shape[1])[None, :] <= positions[:, None]
        y = jax.vmap(attend, in_axes=(0, 0, 0, None), out_axes=1)(q, k, v, mask)
        return jax.vmap(self.out)(y.reshape(t, d)), past


def attend(
    q: Float[Array, "t c"],
    k: Float[Array, "s c"],
    v: Float[Array, "s c"],
    mask: Bool[Array, "t s"],
) -> Float[Array, "t c"]:
    """Computes the attention of one head."""
    # Keys come first, because XLA:CPU copies the second factor of a product to
    # transpose it. For one query, the copy would take longer than the product.
    scores = (k @ q.T).T / q.shape[-1] ** 0.5
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) @ v


def rotate(
    x: Float[Array, "h t c"], positions: Int[Array, " t"]
) -> Float[Array, "h t c"]:
    """Applies rotary position embeddings: rotates pairs of numbers by angles
    proportional to the position, so that products of queries and keys depend only on
    their distance."""
    half = x.shape[-1] // 2
    frequencies = 1000.0 ** (-jnp.arange(half) / half)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles)[None], jnp.sin(angles)[None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
