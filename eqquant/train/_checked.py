from typing import Any, TypeAlias

import jax.numpy as jnp

from ..formats import AbstractFormat, as_format
from ._low_precision_product import Roundings
from ._operand import Rounding
from ._points import as_rounding
from ._stochastic import Stochastic


# How a cotangent is rounded, as users give it. `Any` is a dtype.
Backward: TypeAlias = AbstractFormat | Stochastic | str | Any | None


def as_roundings(
    forward: AbstractFormat | str, backward: Backward | tuple[Backward, Backward]
) -> Roundings:
    """The roundings of a product, from arguments of these names."""
    return Roundings(checked_format("forward", forward), *checked_backward(backward))


def checked_backward(
    backward: Backward | tuple[Backward, Backward],
) -> tuple[Rounding, Rounding]:
    """The roundings for the gradients of the inputs, and of the weights."""
    pair = backward if isinstance(backward, tuple) else (backward, backward)
    if len(pair) != 2:
        raise ValueError(
            "`backward` should be one rounding, or a pair: for the gradients of the "
            f"inputs and of the weights. Got {len(pair)} of them."
        )
    first, second = (_checked_rounding(one) for one in pair)
    return first, second


def checked_format(name: str, format: AbstractFormat | str) -> AbstractFormat:
    """A format that rounds, for the argument with this name."""
    try:
        return as_rounding(as_format(format))
    except ValueError as e:
        raise ValueError(f"`{name}` should be a format that rounds: {e}") from e


def _checked_rounding(rounding) -> Rounding:
    if rounding is None or isinstance(rounding, Stochastic):
        return rounding
    if isinstance(rounding, AbstractFormat | str):
        return checked_format("backward", rounding)
    try:
        dtype = jnp.dtype(rounding)
    except TypeError as e:
        raise TypeError(
            "`backward` should be a format, a `Stochastic` one, a dtype, None, or a "
            f"pair of these. Got {rounding!r}."
        ) from e
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            "`backward` should be a floating-point dtype of 16 bits or more, or a "
            f"format such as `FP8('e5m2')`. Got {dtype.name}."
        )
    return dtype
