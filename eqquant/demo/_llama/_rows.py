import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Int

from ..._array import is_quantized
from ._model import Llama


class LlamaRow(NamedTuple):
    """The size, the loss and the speed of a model in one format.

    - `format`: the format of the weights of its layers, as written in Python.
    - `method`: `"the file"`, `"nearest"` or `"GPTQ"`. Empty for the model in float32.
    - `bits_per_weight`: the bits per weight of the matrices of its layers, scales
      included.
    - `megabytes`: the size of the whole model.
    - `nats_per_token`, `nats_error`: the loss on held-out text, and its standard error.
    - `change_per_token`, `change_error`: the difference from the loss in float32 on the
      same tokens, and its standard error.
    - `tokens_per_second`: the speed at which one text is continued.
    - `text`: the continuation of the prompt.
    """

    format: str
    method: str
    bits_per_weight: float
    megabytes: float
    nats_per_token: float
    nats_error: float
    change_per_token: float
    change_error: float
    text: str
    tokens_per_second: float = math.nan

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.nats_per_token)


def losses(
    model: Llama, windows: Int[np.ndarray, "b t"], batch: int
) -> Float[np.ndarray, " n"]:
    """Returns the loss of each token but the first of each window, in nats. It takes
    `batch` windows at a time, which should divide their number."""
    parts = jnp.asarray(windows).reshape(-1, batch, windows.shape[-1])
    return np.concatenate([np.asarray(_losses(model, part)).ravel() for part in parts])


@eqx.filter_jit
def _losses(model: Llama, windows: Int[Array, "b t"]) -> Float[Array, "b t-1"]:
    logits = jax.nn.log_softmax(jax.vmap(model)(windows)[:, :-1])
    return -jnp.take_along_axis(logits, windows[:, 1:, None], axis=-1)[..., 0]


def mean_and_error(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Returns the mean, and its standard error if the values are independent."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)


def bits_of(model: Llama) -> float:
    """Returns the bits per weight of the matrices of layers, scales included."""
    ndim = 2 if isinstance(model.layers, list) else 3
    leaves = jtu.tree_leaves(model.layers, is_leaf=is_quantized)
    weights = [leaf for leaf in leaves if leaf.ndim >= ndim]
    return 8 * sum(w.nbytes for w in weights) / sum(w.size for w in weights)


def size_of(model: Llama) -> int:
    """Returns the number of parameters of a model."""
    return sum(a.size for a in jtu.tree_leaves(model, is_leaf=is_quantized))


def megabytes_of(model: Llama) -> float:
    """Returns the size of a model in megabytes."""
    return sum(a.nbytes for a in jtu.tree_leaves(model, is_leaf=is_quantized)) / 1e6
