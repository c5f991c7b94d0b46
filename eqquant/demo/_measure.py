import jax.tree_util as jtu
from jaxtyping import Array, UInt8

from .._array import is_quantized
from ._loss import mean_loss
from ._model import LanguageModel
from ._table import Row


def measure(name: str, model: LanguageModel, held_out: UInt8[Array, "b t"]) -> Row:
    """What a model takes, and its loss on windows of a text. Nothing of its speed: that
    takes a machine with nothing else to do."""
    leaves = jtu.tree_leaves(model, is_leaf=is_quantized)
    weights = [leaf for leaf in leaves if is_quantized(leaf)] or leaves
    return Row(
        format=name,
        bits_per_weight=8 * _nbytes(weights) / sum(leaf.size for leaf in weights),
        megabytes=_nbytes(leaves) / 1e6,
        nats_per_byte=mean_loss(model, held_out, batch=min(64, len(held_out))),
    )


def _nbytes(arrays):
    return sum(a.nbytes for a in arrays)
