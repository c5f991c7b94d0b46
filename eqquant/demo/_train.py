from collections.abc import Iterator
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, UInt8

from ._model import LanguageModel


def train(
    model: LanguageModel,
    text: UInt8[np.ndarray, " t"],
    *,
    steps: int,
    batch: int,
    window: int,
    learning_rate: float,
    key: PRNGKeyArray,
) -> Iterator[tuple[LanguageModel, Float[Array, ""]]]:
    """Trains a model on random windows of a text. After each step, yields the model,
    and its loss before the step, in nats per byte."""
    device_text = jnp.asarray(text)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    moments = init(params)

    @eqx.filter_jit
    def step(params, moments, text):
        starts = jr.randint(
            jr.fold_in(key, moments.count), (batch, 1), 0, text.size - window
        )
        windows = text[starts + jnp.arange(window + 1)[None, :]]
        value, grads = eqx.filter_value_and_grad(
            lambda params: loss(eqx.combine(params, static), windows)
        )(params)
        rate = warmup_cosine(moments.count, steps, learning_rate)
        return *update(params, grads, moments, rate), value

    for _ in range(steps):
        params, moments, value = step(params, moments, device_text)
        yield eqx.combine(params, static), value


def loss(model: LanguageModel, windows: UInt8[Array, "b t"]) -> Float[Array, ""]:
    """Returns the mean cross-entropy of all bytes but the first of each window, in
    nats."""
    logits = jax.vmap(model)(windows[:, :-1])
    target = windows[:, 1:, None].astype(jnp.int32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), target, axis=-1))


def mean_loss(model: LanguageModel, windows: UInt8[Array, "b t"], batch: int) -> float:
    """Computes `loss`, `batch` windows at a time, which should divide their number."""
    batches = windows.reshape(-1, batch, windows.shape[-1])
    return sum(float(_loss(model, x)) for x in batches) / len(batches)


_loss = eqx.filter_jit(loss)


class Moments(NamedTuple):
    """The state of AdamW: running means of the gradients and of their squares."""

    mean: PyTree[Array]
    square: PyTree[Array]
    count: Int[Array, ""]


def init(params: PyTree[Array]) -> Moments:
    """Returns the initial state of AdamW."""
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
    """Takes one step of AdamW (Loshchilov and Hutter, 2019, Algorithm 2)."""
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
    """Returns the learning rate, which rises linearly to `peak`, then falls to zero
    along a cosine."""
    done = (count + 1).astype(jnp.float32) / (steps + 1)
    return peak * jnp.minimum(done / warmup, (1 + jnp.cos(jnp.pi * done)) / 2)
