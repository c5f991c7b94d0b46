import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Int, PRNGKeyArray, UInt8

from ._model import LanguageModel, Past


class _State(eqx.Module):
    text: UInt8[Array, " s"]
    given: Int[Array, ""]
    position: Int[Array, ""]
    past: list[Past]
    key: PRNGKeyArray


def generate(
    model: LanguageModel, prompt: bytes, length: int, *, key: PRNGKeyArray
) -> bytes:
    """Continues a text to `length` bytes in all, one byte at a time.

    Models that are nearly the same give nearly the same text for the same `key`.
    """
    state = _start(model, prompt, length, key)
    for _ in range(length - 1):
        state = _step(model, state)
    return bytes(state.text.tolist())


def bytes_per_second(model: LanguageModel, length: int, *, key: PRNGKeyArray) -> float:
    """How fast `generate` is, with a batch of one, once it is compiled."""
    state = _step(model, _start(model, b"\n", length, key))
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(length - 2):
        state = _step(model, state)
    jax.block_until_ready(state)
    return (length - 2) / (time.perf_counter() - start)


def _start(model, prompt, length, key):
    return _State(
        text=jnp.asarray(list(prompt.ljust(length, b"\0")), jnp.uint8),
        given=jnp.asarray(len(prompt)),
        position=jnp.asarray(0),
        past=model.empty_past(length),
        key=jr.clone(key),
    )


@eqx.filter_jit(donate="all-except-first")
def _step(model: LanguageModel, state: _State) -> _State:
    # Shapes are the same at every position, so this compiles once. The prompt is read
    # in the same way as the rest is written.
    i = state.position
    logits, past = model.step(state.text[i][None], i, state.past)
    # A low temperature: a small model is wrong about many unlikely bytes.
    drawn = jr.categorical(jr.fold_in(state.key, i), logits[0] / 0.5)
    given = state.text[i + 1]
    new = jnp.where(i + 1 < state.given, given, drawn.astype(jnp.uint8))
    text = state.text.at[i + 1].set(new)
    return _State(text, state.given, i + 1, past, state.key)
