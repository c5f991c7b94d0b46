import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

from ._model import LanguageModel


# The length of every generated text, so that each model is compiled once. It is the
# length of the windows that the model was trained on.
_room = 128
# Low, because a small model gives unlikely bytes too much probability.
_temperature = 0.5


def generate(model: LanguageModel, prompt: bytes, *, key: PRNGKeyArray) -> bytes:
    """Continues a text to 128 bytes in all. For the same key, similar models write
    similar texts."""
    return bytes(_generate(model, prompt, key).tolist())


def _generate(model, prompt, key):
    text = jnp.asarray(list(prompt.ljust(_room, b"\0")), jnp.uint8)
    given = jnp.asarray(len(prompt))
    position = jnp.asarray(0)
    past = model.empty_past(_room)
    # The prompt is read one byte at a time, too.
    for _ in range(_room - 1):
        logits, past = _read(model, text, position, past)
        text, position = _write(text, given, position, logits, key)
    return text


@eqx.filter_jit
def _read(model, text, position, past):
    logits, past = model.step(text[position][None], position, past)
    return logits[0], past


# Separate from `_read`, so that it is compiled once for all formats.
@eqx.filter_jit
def _write(
    text: UInt8[Array, " s"],
    given: Int[Array, ""],
    position: Int[Array, ""],
    logits: Float[Array, " 256"],
    key: PRNGKeyArray,
) -> tuple[UInt8[Array, " s"], Int[Array, ""]]:
    new = jr.categorical(jr.fold_in(key, position), logits / _temperature)
    position = position + 1
    new = jnp.where(position < given, text[position], new.astype(jnp.uint8))
    return text.at[position].set(new), position
