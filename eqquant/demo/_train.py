from collections.abc import Iterator

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from . import _adamw as adamw
from ._loss import loss
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
    """Trains a model on random windows of a text. After each step, yields it and the
    loss, in nats per byte, from before the step."""
    device_text = jnp.asarray(text)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    moments = adamw.init(params)

    @eqx.filter_jit
    def step(params, moments, text):
        starts = jr.randint(
            jr.fold_in(key, moments.count), (batch, 1), 0, text.size - window
        )
        windows = text[starts + jnp.arange(window + 1)[None, :]]
        value, grads = eqx.filter_value_and_grad(
            lambda params: loss(eqx.combine(params, static), windows)
        )(params)
        rate = adamw.warmup_cosine(moments.count, steps, learning_rate)
        return *adamw.update(params, grads, moments, rate), value

    for _ in range(steps):
        params, moments, value = step(params, moments, device_text)
        yield eqx.combine(params, static), value
