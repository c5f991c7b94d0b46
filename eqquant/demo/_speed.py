import time
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np

from ._model import Block, LanguageModel


# Large enough that the overhead of calling a program does not matter.
_width, _depth, _heads = 1024, 2, 16
_positions = 64  # of the cache of keys and values


def larger() -> LanguageModel:
    """Returns a larger model of the demo's kind, with 26 million parameters. It is not
    trained, since its speed does not depend on its weights."""
    return LanguageModel(_width, _depth, _heads, key=jr.key(0))


class Unrolled(eqx.Module):
    """A model whose layers are not scanned, because XLA copies the arrays that it scans
    over."""

    model: LanguageModel
    blocks: list[Block]

    def __init__(self, model: LanguageModel):
        layer = lambda i: jtu.tree_map(
            lambda a: a[i] if eqx.is_array(a) else a, model.blocks
        )
        self.blocks = [layer(i) for i in range(model.depth)]
        self.model = eqx.tree_at(lambda model: model.blocks, model, None)

    def __call__(self, token, position, past):
        x = jax.vmap(self.model.embedding)(token[None])
        new = []
        for block, cache in zip(self.blocks, past):
            x, cache = block(x, position, cache)
            new.append(cache)
        return jax.vmap(self.model.head)(jax.vmap(self.model.norm)(x))[0], new


def tokens_per_second(models: Sequence[Unrolled]) -> list[float]:
    """Returns the tokens per second at which each model generates one text, with its
    weights read from memory. The models take turns, so that other load on the machine
    slows down all of them alike. The times are lower quartiles over all steps."""
    seconds = [[] for _ in models]
    other = np.zeros(2**25, np.float32)
    for _ in range(24):
        for model, times in zip(models, seconds):
            other += 1  # takes the place of the weights in the caches
            times.append(time_of_step(model))
    return [1 / np.percentile(times, 25) for times in seconds]


def time_of_step(model: Unrolled) -> float:
    """Returns the time of one step in seconds. The first call includes compilation."""
    token, position = jnp.asarray(0, jnp.uint8), jnp.asarray(_positions - 1)
    past = [jnp.zeros((2, _heads, _positions, _width // _heads))] * _depth
    jax.block_until_ready((token, position, past))
    start = time.perf_counter()
    jax.block_until_ready(_step(model, token, position, past))
    return time.perf_counter() - start


@eqx.filter_jit
def _step(model, token, position, past):
    logits, past = model(token, position, past)
    return jnp.argmax(logits).astype(token.dtype), past
