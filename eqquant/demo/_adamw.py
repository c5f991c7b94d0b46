from typing import NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Int, PyTree


class Moments(NamedTuple):
    """The state of AdamW: running means of the gradients and of their squares."""

    mean: PyTree[Array]
    square: PyTree[Array]
    count: Int[Array, ""]


def init(params: PyTree[Array]) -> Moments:
    zeros = jtu.tree_map(jnp.zeros_like, params)
    return Moments(zeros, zeros, jnp.asarray(0))


def update(
    params: PyTree[Array],
    grads: PyTree[Array],
    moments: Moments,
    learning_rate: Float[Array, ""],
    decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.95,
) -> tuple[PyTree[Array], Moments]:
    """One step of AdamW (Loshchilov and Hutter, 2019, Algorithm 2)."""
    t = (moments.count + 1).astype(jnp.float32)
    mean = jtu.tree_map(lambda m, g: b1 * m + (1 - b1) * g, moments.mean, grads)
    square = jtu.tree_map(lambda v, g: b2 * v + (1 - b2) * g**2, moments.square, grads)

    def new(p, m, v):
        step = m / (1 - b1**t) / (jnp.sqrt(v / (1 - b2**t)) + 1e-8)
        return p - learning_rate * (step + decay * p)

    params = jtu.tree_map(new, params, mean, square)
    return params, Moments(mean, square, moments.count + 1)


def warmup_cosine(
    count: Int[Array, ""], steps: int, peak: float, warmup: float = 0.1
) -> Float[Array, ""]:
    """The learning rate: up to `peak` on a line, and down to zero on a cosine."""
    done = (count + 1).astype(jnp.float32) / (steps + 1)
    return peak * jnp.minimum(done / warmup, (1 + jnp.cos(jnp.pi * done)) / 2)
