import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ._model import Llama


@eqx.filter_jit
def generate(
    model: Llama, prompt: Int[Array, " t"], number: int
) -> Int[Array, " {number}"]:
    """Continues a text by its most likely tokens, in one program: it reads the prompt
    at once, then generates token by token with a cache.

    **Arguments:**

    - `prompt`: the tokens of the text.
    - `number`: how many tokens to add.

    **Returns:**

    The added tokens.
    """
    past = model.empty_past(len(prompt) + number)
    logits, past = model.step(prompt, jnp.asarray(0), past)

    def step(state, i):
        token, past = state
        logits, past = model.step(token[None], len(prompt) + i, past)
        return (_favourite(logits), past), token

    state = _favourite(logits), past
    _, tokens = jax.lax.scan(step, state, jnp.arange(number))
    return tokens


def _favourite(logits):
    return jnp.argmax(logits[-1]).astype(jnp.int32)
