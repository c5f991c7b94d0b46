import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from ._model import LanguageModel


def loss(model: LanguageModel, windows: UInt8[Array, "b t"]) -> Float[Array, ""]:
    """The mean over windows of -log p of each byte but the first, in nats."""
    logits = jax.vmap(model)(windows[:, :-1])
    target = windows[:, 1:, None].astype(jnp.int32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), target, axis=-1))


def mean_loss(model: LanguageModel, windows: UInt8[Array, "b t"], batch: int) -> float:
    """The same, some windows at a time. `batch` should divide how many there are."""
    batches = windows.reshape(-1, batch, windows.shape[-1])
    return sum(float(_loss(model, x)) for x in batches) / len(batches)


_loss = eqx.filter_jit(loss)
