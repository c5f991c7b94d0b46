from typing import Any, TypeAlias

import jax.numpy as jnp

from ...formats import AbstractFormat, as_format
from .._points import as_rounding
from .._stochastic import Stochastic
from ._delayed import Delayed
from ._operand import Rounding
from ._product import Roundings


# The roundings of a cotangent that users may pass. `Any` is a dtype.
Backward: TypeAlias = AbstractFormat | Stochastic | Delayed | str | Any | None


def as_roundings(
    forward: AbstractFormat | str, backward: Backward | tuple[Backward, Backward]
) -> Roundings:
    """Returns the roundings of a product without a weight, from arguments of these
    names."""
    pair = backward if isinstance(backward, tuple) else (backward,)
    if any(isinstance(r, Delayed) for r in (forward, *pair)):
        raise ValueError(
            "`Delayed` keeps its history with a weight, and this product has none. Got "
            f"{forward} and {backward}: pass the formats themselves."
        )
    return Roundings(checked_format("forward", forward), *checked_backward(backward))


def checked_backward(
    backward: Backward | tuple[Backward, Backward],
) -> tuple[Rounding, Rounding]:
    """Returns the roundings for the gradients of the inputs, and of the weights."""
    pair = backward if isinstance(backward, tuple) else (backward, backward)
    if len(pair) != 2:
        raise ValueError(
            "`backward` should be one rounding, or a pair: for the gradients of the "
            f"inputs and of the weights. Got {len(pair)} of them."
        )
    first, second = (_checked_rounding(one) for one in pair)
    steps = {r.history for r in (first, second) if isinstance(r, Delayed)}
    if len(steps) > 1:
        raise ValueError(
            "`backward` should have one `history`: both of its products round the same "
            f"cotangent. Got {first} and {second}."
        )
    return first, second


def checked_forward(
    forward: AbstractFormat | Delayed | str,
) -> tuple[AbstractFormat, AbstractFormat | Delayed]:
    """Returns the format of the weight and the inputs, and their rounding to it."""
    if not isinstance(forward, Delayed):
        format = checked_format("forward", forward)
        return format, format
    if isinstance(forward.format, Stochastic):
        raise ValueError(
            "`forward` rounds to the nearest number: only `backward` may be "
            f"`Stochastic`. Got {forward}."
        )
    return forward.format, forward


def checked_format(name: str, format: AbstractFormat | str) -> AbstractFormat:
    """Returns a format that rounds, for the argument with this name."""
    try:
        return as_rounding(as_format(format, name))
    except ValueError as e:
        raise ValueError(f"`{name}` should be a format that rounds: {e}") from e


def _checked_rounding(rounding) -> Rounding:
    if rounding is None or isinstance(rounding, Stochastic | Delayed):
        return rounding
    if isinstance(rounding, AbstractFormat | str):
        return checked_format("backward", rounding)
    try:
        dtype = jnp.dtype(rounding)
    except TypeError as e:
        raise TypeError(
            "`backward` should be a format, a `Stochastic` or `Delayed` one, a dtype, "
            f"None, or a pair of these. Got {rounding!r}."
        ) from e
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            "`backward` should be a floating-point dtype of 16 bits or more, or a "
            f"format such as `FP8('e5m2')`. Got {dtype.name}."
        )
    return dtype
