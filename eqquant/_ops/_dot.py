import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Inexact, Shaped

from .._array import as_mapped, permuted, QuantizedArray, reshaped_leading
from .._product import as_tuple, declared_by_row, qmatmul_rows


# As in `lax.dot_general`: the contracted axes of both operands, and their batch axes.
DotDimensionNumbers: TypeAlias = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]


def dot(
    x: Shaped[Array, "..."],
    q: QuantizedArray,
    dimension_numbers: DotDimensionNumbers,
    *,
    out_dtype: Any,
    precision: str | None,
    q_first: bool = False,
) -> Inexact[Array, "..."] | None:
    """Computes `lax.dot_general(x, q, ...)` from the packed codes. If `q_first`, the
    axes of `q` come before the axes of `x` in the result; `dimension_numbers` have `x`
    first either way.

    Each axis of `q` is a batch axis, contracted, or free. If the axes along which
    blocks lie are either all contracted or all free, this reduces to products of
    matrices. Otherwise, or if rows that are stored together would be taken apart,
    returns `None`.
    """
    q = as_mapped(q)
    (x_contracted, q_contracted), (x_batch, q_batch) = dimension_numbers
    shape, axes = q.shape, as_tuple(q.axis)
    blocked = [len(shape) + i for i in axes]
    lead = [i for i in range(len(shape)) if i not in blocked]
    free = [i for i in lead if i not in (*q_contracted, *q_batch)]
    summed = [i for i in lead if i in q_contracted]
    x_free = [i for i in range(x.ndim) if i not in (*x_contracted, *x_batch)]
    x_of = dict(zip(q_contracted, x_contracted)) | dict(zip(q_batch, x_batch))
    if any(i in q_batch for i in blocked):
        return None
    is_along = [i in q_contracted for i in blocked]
    if all(is_along) and (free or not summed):
        # The last free axis becomes the rows; without free axes there is one row.
        rows = free[-1:]
        stack = [*q_batch, *summed, *free[:-1]]
        sums = range(len(q_batch), len(q_batch) + len(summed))
        contracted = blocked
    elif not any(is_along) and summed:
        rows = summed
        stack = [*q_batch, *free]
        sums = range(0)
        contracted = summed
    else:
        return None

    moves = [*stack, *rows] != lead or len(rows) != 1
    if moves and q.format.rows_together > 1:
        return None

    # Lay out the weights as `stack rows blocked`, the inputs as
    # `stack x_free contracted`.
    sharding = declared_by_row(q.sharding, q.axis, q.ndim)
    if not moves:
        stored, layout = q.stored, q.layout
    else:
        stored, layout = _matrices(q, shape, stack, rows, blocked)
        if sharding is not None:
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
    dtype = _dtype(x, q, out_dtype, exact_sums=len(sums) > 0)
    x_stack = [i for i in stack if i in x_of]
    order = [*[x_of[i] for i in x_stack], *x_free, *[x_of[i] for i in contracted]]
    x_shape = [x.shape[i] for i in x_free]
    y = qmatmul_rows(
        lax.transpose(x, order)
        .reshape(
            *[shape[i] if i in x_of else 1 for i in stack],
            *x_shape,
            math.prod(shape[i] for i in contracted),
        )
        .astype(dtype),
        stored,
        row_axes=len(x_free),
        product="matmul" if contracted is blocked else "matmul_transposed",
        layout=layout,
        sharding=sharding,
        activation=q.activation,
        precision=precision,
    )
    if len(sums) > 0:
        y = jnp.sum(y, axis=tuple(sums))

    # The product has free axes of `q` before and after the free axes of `x`: bring them
    # into the order of `lax.dot_general`.
    before = [i for i in stack if i not in (*q_batch, *summed)]
    after = rows if contracted is blocked else blocked
    batch_shape = [shape[i] for i in q_batch]
    y = y.reshape(
        *batch_shape,
        *[shape[i] for i in before],
        *x_shape,
        *[shape[i] for i in after],
    )
    names = [("q", i) for i in before]
    names += [("x", i) for i in x_free] + [("q", i) for i in after]
    names_x = [name for name in names if name[0] == "x"]
    names_q = sorted(name for name in names if name[0] == "q")
    wanted = names_q + names_x if q_first else names_x + names_q
    number = len(batch_shape)
    places = [number + names.index(name) for name in wanted]
    y = lax.transpose(y, [*range(number), *places])
    return y.astype(out_dtype)


def precision_name(precision: Any) -> str | None:
    """Returns the name of a `precision` argument of `lax.dot_general`. For a pair,
    returns the higher one."""
    if isinstance(precision, tuple):
        return precision_name(max(precision, key=lambda p: p.value))
    if precision is None or isinstance(precision, str):
        return precision
    if isinstance(precision, lax.Precision):
        return precision.name.lower()
    if isinstance(precision, lax.DotAlgorithmPreset):
        return precision.name
    return "highest"  # An algorithm: none is more accurate.


def _matrices(q, shape, stack, rows, blocked):
    # Permutes the leading axes to `stack`, then `rows`, and merges `rows` into one
    # axis.
    new = permuted(q, [*stack, *rows, *blocked])
    assert new is not None
    row = math.prod(shape[i] for i in rows)
    new = reshaped_leading(new, (*[shape[i] for i in stack], row))
    return new.stored, new.layout


def _dtype(x, q, out_dtype, exact_sums):
    # The dtype in which the product is computed.
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else q.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    if exact_sums:
        dtype = _wider(dtype, np.dtype(np.float32))
    floating = jnp.issubdtype(out_dtype, jnp.inexact)
    return _wider(dtype, np.dtype(out_dtype)) if floating else dtype


def _wider(a, b):
    return b if b.itemsize > a.itemsize else a
