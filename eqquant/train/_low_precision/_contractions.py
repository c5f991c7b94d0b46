import math
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from ..._product import transposed, vary_together
from ...kernels import integer_product
from ._dots import dims_of, dot, floats, Kind
from ._microscaled import is_microscaled, microscaled
from ._operand import (
    as_operand,
    is_same_kind,
    narrow_columns,
    Operand,
    rounded,
    Rounding,
)


transposes: dict[Kind, Kind] = {
    "along": "across",
    "across": "along",
    "spread": "outer",
    "outer": "spread",
}


def layer(x: Operand, w: Operand, stack: int, dtype: Any) -> Float[Array, "..."]:
    """Multiplies `X[*b, *r, k]` by `W[*b, n, k]`, both rounded."""
    dims = dims_of("along", len(x.shape), stack)
    if not is_same_kind(x.layout.format, w):
        if is_microscaled(x, w):
            return microscaled(x, w, stack, dtype)
        return floats(x.decode(), w.decode(), dims, dtype)
    (a, of_rows), (b, of_channels) = x.narrow, w.narrow
    y = _narrow(a, b, stack, False) * of_rows[..., None]
    return (y * _of_last(of_channels, y.ndim, stack)).astype(dtype)


def contract(
    kind: Kind,
    x: Float[Array, "..."],
    operand: Operand,
    stack: int,
    rounding: Rounding,
    dtype: Any,
    delayed: Float[Array, "*b"] | None = None,
) -> Float[Array, "..."]:
    """Computes one of the four products, in a dtype. `x` is rounded along the axes that
    the product contracts, with `delayed` scales if its rounding is `Delayed`. If both
    operands then have 8 bits, they are multiplied directly. For this, the scales of the
    operand along contracted axes are multiplied into `x` before it is rounded."""
    rows = (len(operand.shape) if kind == "outer" else x.ndim) - stack - 1
    if kind == "outer" and rows > 0 and rounding is not None:
        return _outer(x, operand, stack, rounding, dtype, delayed)
    dims = dims_of(kind, len(operand.shape) if kind == "spread" else x.ndim, stack)
    if rounding is None or rows == 0 and kind == "outer":
        y, w = x, operand.decode()
        return floats(*((w, y) if kind == "spread" else (y, w)), dims, dtype)
    if isinstance(rounding, np.dtype):
        x, w = x.astype(rounding), operand.decode().astype(rounding)
        return dot(x, w, dims, jnp.float32).astype(dtype)
    if not is_same_kind(rounding, operand):
        x = rounded(x, rounding, delayed).astype(x.dtype)
        return floats(x, operand.decode(), dims, dtype)
    codes, scale = operand.narrow
    x = x.astype(jnp.float32) * _of_last(scale, x.ndim, stack)
    left, unit = as_operand(x, rounding, _times(delayed, scale, stack)).narrow
    return (_narrow(left, codes, stack, True) * unit[..., None]).astype(dtype)


def _outer(y, operand, stack, rounding, dtype, delayed):
    # The contracted axes, perhaps several, become one axis.
    lead = operand.shape[:-1]
    merged = (*lead[:stack], math.prod(lead[stack:]))
    y = y.reshape(*merged, y.shape[-1])

    def merge(a):
        a = jnp.broadcast_to(a, (*lead, a.shape[-1]))
        return a.reshape(*merged, a.shape[-1])

    operand = Operand(jtu.tree_map(merge, operand.stored), operand.layout)
    if isinstance(rounding, np.dtype) or not is_same_kind(rounding, operand):
        return contract("across", y.mT, operand, stack, rounding, dtype, delayed)
    codes, scale = operand.narrow
    y = y.astype(jnp.float32) * scale[..., None]
    y, unit = narrow_columns(y, rounding, _times(delayed, scale, stack))
    w = _narrow(transposed(y), codes, stack, True)
    return (w * unit[..., None]).astype(dtype)


def _times(delayed, scale, stack):
    """Multiplies delayed scales by the scales of an operand."""
    if delayed is None:
        return None
    return delayed * jnp.max(scale, range(stack, scale.ndim), initial=0)


def _narrow(a: Shaped[Array, "..."], b: Shaped[Array, "..."], stack: int, across: bool):
    """Multiplies 8-bit numbers, along or across `b`, in float32."""
    if a.dtype == jnp.int8:
        a, b = vary_together(a, b)
        return integer_product(a, b, stack=stack, across=across)
    dims = dims_of("across" if across else "along", a.ndim, stack)
    return dot(a, b, dims, jnp.float32)


def _of_last(scale: Float[Array, "*b n"], ndim: int, stack: int):
    """Adds axes of size one, so that a scale broadcasts along the last of `ndim`
    axes."""
    return lax.expand_dims(scale, range(stack, ndim - 1))
