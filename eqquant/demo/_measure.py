import jax
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, UInt8

from .._array import is_quantized
from ._generate import bytes_per_second
from ._loss import mean_loss
from ._model import LanguageModel
from ._table import Row


def measure(
    name: str, model: LanguageModel, held_out: UInt8[Array, "b t"], dense: Row | None
) -> Row:
    """A row of the table. `dense` is that of the model before it was quantized."""
    leaves = jtu.tree_leaves(model, is_leaf=is_quantized)
    quantized = [leaf for leaf in leaves if is_quantized(leaf)] or leaves
    size = sum(leaf.size for leaf in quantized)
    nats = mean_loss(model, held_out, batch=min(64, len(held_out)))
    return Row(
        format=name,
        bits_per_weight=8 * sum(leaf.nbytes for leaf in quantized) / size,
        megabytes=sum(leaf.nbytes for leaf in leaves) / 1e6,
        nats_per_byte=nats,
        change=0.0 if dense is None else nats - dense.nats_per_byte,
        bytes_per_second=bytes_per_second(model, 128, key=jr.key(0)),
    )
