import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Integer, Shaped

from .._array import as_dense, is_quantized, QuantizedArray
from .._ops import DotDimensionNumbers
from ._transform import implicit


def qdot_general(
    x: QuantizedArray | Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    w: QuantizedArray | Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    dimension_numbers: DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Shaped[Array, "..."]:
    """`jax.lax.dot_general`, where either or both operands may be quantized.

    !!! Example

        ```python
        y = eqquant.qdot_general(x, w, (((1,), (1,)), ((0,), (0,))))
        ```

    **Arguments:**

    - `x`, `w`: the operands. The product reads the packed codes if it contracts all the
        axes along which blocks lie, or none of these but another axis. Otherwise the
        operand is dequantized.
    - Others: as in `jax.lax.dot_general`.

    **Returns:**

    The product, in the dtype of the dense operand unless `preferred_element_type` is
    given. (In the dtype of the quantized operand, if the dense one is an integer.) It
    is accumulated in float32.

    **Raises:**

    The errors of `jax.lax.dot_general` if the shapes do not match.
    """
    contracted, batch = dimension_numbers
    numbers = tuple(map(tuple, contracted)), tuple(map(tuple, batch))
    x, w = _of_one_dtype([x, w])
    return _dot_general(x, w, numbers, precision, preferred_element_type)


# Jitted so that eager calls compile once for each shape, like the functions below.
@ft.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _dot_general(x, w, *params):
    return implicit(lambda x, w: lax.dot_general(x, w, *params))(x, w)


def qeinsum(
    subscripts: str,
    *operands: QuantizedArray | Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Shaped[Array, "..."]:
    """`jnp.einsum`, where any operand may be quantized.

    !!! Example

        ```python
        w = eqquant.quantize(w, "nf4", axis=-1)  # heads, features of each, inputs
        y = eqquant.qeinsum("ti,hei->the", x, w)
        ```

    **Arguments:**

    - `subscripts`, `operands`, and others: as in `jnp.einsum`. The products read packed
        codes under the same conditions as in [`eqquant.qdot_general`][].

    **Returns:**

    An array, in the dtype of the dense operands unless `preferred_element_type` is
    given. (In the dtype of the quantized operands, if the dense ones are integers.)

    **Raises:**

    The errors of `jnp.einsum` if the shapes do not match. A `TypeError` if `subscripts`
    is not a string.
    """
    if not isinstance(subscripts, str):
        raise TypeError(
            "`subscripts` should be a string such as 'mk,kn->mn'. Got "
            f"{type(subscripts).__name__}."
        )
    operands = tuple(_of_one_dtype(operands))
    return _einsum(operands, subscripts, precision, preferred_element_type)


# (Each static argument is compared alone: within tuples, NumPy's float64 equals None.)
@ft.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _einsum(operands, subscripts, precision, dtype):
    params = dict(precision=precision, preferred_element_type=dtype)
    einsum = lambda *operands: jnp.einsum(subscripts, *operands, **params)
    return as_dense(implicit(einsum)(*operands))


def qtake(
    w: QuantizedArray | Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    ids: Integer[Array, "..."] | Integer[np.ndarray, "..."] | int,
    axis: int = 0,
    *,
    mode: str | None = None,
) -> Shaped[Array, "..."] | QuantizedArray:
    """`jnp.take` for an array that may be quantized. It reads only the selected
    entries.

    !!! Example

        ```python
        table = eqquant.quantize(table, "int8", axis=-1)
        x = eqquant.qtake(table, tokens)  # decodes these rows alone

        experts = eqquant.quantize(experts, "nf4")  # experts, in, out
        some = eqquant.qtake(experts, ids)  # packed
        y = eqquant.qeinsum("ti,tio->to", x, some)
        ```

    **Arguments:**

    - `w`: the array to take from.
    - `ids`, `axis`, `mode`: as in `jnp.take`. If blocks lie along `axis`, `w` is
        dequantized.

    **Returns:**

    The selected rows of a matrix, as a dense array. For a stack of matrices and an
    `axis` of the stack, a [`eqquant.QuantizedArray`][].
    """
    return _take(w, jnp.asarray(ids), axis, mode)


@ft.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _take(w, ids, axis, mode):
    return implicit(lambda w, ids: jnp.take(w, ids, axis=axis, mode=mode))(w, ids)


def _of_one_dtype(operands: Sequence[Any]) -> list[Any]:
    # Casts quantized operands and integers to the dtype of the dense operands.
    operands = [x if is_quantized(x) else jnp.asarray(x) for x in operands]
    arrays = [x for x in operands if not is_quantized(x)]
    quantized = [q for q in operands if is_quantized(q)]
    if not quantized:
        return operands
    floating = [x.dtype for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    dtype = jnp.result_type(*floating) if floating else quantized[0].dtype
    return [
        x.astype(dtype)
        if is_quantized(x) or not jnp.issubdtype(x.dtype, jnp.inexact)
        else x
        for x in operands
    ]
