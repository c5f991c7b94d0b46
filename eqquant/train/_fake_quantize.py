import functools as ft
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ..formats import reciprocal
from ._straight_through import estimate


def fake_quantize(
    x: Shaped[Array, "..."],
    bits: int = 8,
    *,
    per: Literal["token", "tensor"] = "token",
    symmetric: bool = True,
) -> Float[Array, "..."]:
    """Rounds activations to integers times a scale, found anew for each of them
    (dynamic quantization), with the derivative of the identity.

    !!! Example

        ```python
        x = eqquant.train.fake_quantize(x)
        y = eqquant.straight_through(w, "ternary") @ x
        ```

    **Arguments:**

    - `x`: a floating-point array.
    - `bits`: of each integer, from 2 to 16.
    - `per`: `"token"` for a scale for each vector along the last axis, `"tensor"` for
        one scale of all of `x`.
    - `symmetric`: `True` for integers of either sign, times the largest absolute value
        divided by the largest integer. `False` for integers from zero on, less a
        zero-point, times the range divided by the largest integer; the range is widened
        to include zero. Either way zeros stay zeros.

    **Returns:**

    An array of the shape and dtype of `x`. Where a scale is of numbers that are not all
    finite, NaN.

    **Raises:**

    A `TypeError` if `x` is not a floating-point array. A `ValueError` for other `bits`
    or `per`.

    ??? cite "Reference"

        Integer Quantization for Deep Learning Inference: Principles and Empirical
        Evaluation. Wu et al., 2020. Section 3.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`x` should be a floating-point array. Got {x.dtype.name}.")
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16:
        raise ValueError(f"`bits` should be an integer from 2 to 16. Got {bits!r}.")
    if per not in ("token", "tensor"):
        raise ValueError(f"`per` should be 'token' or 'tensor'. Got {per!r}.")
    return _fake_quantize(x, bits, -1 if per == "token" and x.ndim else None, symmetric)


@ft.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _fake_quantize(x, bits, axis, symmetric):
    wide = lax.stop_gradient(x).astype(jnp.float32)
    low = jnp.min(wide, axis, keepdims=True, initial=0)
    high = jnp.max(wide, axis, keepdims=True, initial=0)
    if symmetric:
        last = 2 ** (bits - 1) - 1
        first = -last
        scale = jnp.maximum(high, -low) / last
        zero = jnp.zeros_like(scale)
    else:
        first, last = 0, 2**bits - 1
        scale = (high - low) / last
        zero = jnp.round(-low * reciprocal(scale))
    # A maximum cannot be trusted to: on CPU, XLA's drops NaNs.
    finite = jnp.all(jnp.isfinite(wide), axis, keepdims=True)
    scale = jnp.where(finite, scale, jnp.nan)
    codes = jnp.clip(jnp.round(wide * reciprocal(scale)) + zero, first, last)
    return estimate(((codes - zero) * scale).astype(x.dtype), x)
