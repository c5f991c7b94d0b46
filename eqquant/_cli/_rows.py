import math
from typing import Any

from .._report import Row


def row_of(entry: Any, after: int, **others: Any) -> Row:
    """Returns the row of a report for an entry of a checkpoint, or for the outcome of
    converting one. `after` is its size in bytes."""
    size = math.prod(entry.shape)
    dtype = entry.dtype if isinstance(entry.dtype, str) else entry.dtype.name
    return Row(
        path=entry.name,
        shape=entry.shape,
        dtype=dtype,
        format=None if entry.format is None else str(entry.format),
        activation=None,
        axis=entry.axis,
        bits_per_weight=8 * after / max(1, size),
        **{
            "before": size * _itemsize(dtype),
            "after": after,
            "sqnr": None,
            "reason": "",
            "hint": "",
            "tied_to": None,
            **others,
        },
    )


def _itemsize(dtype):
    import jax.numpy as jnp

    return jnp.dtype(dtype).itemsize
