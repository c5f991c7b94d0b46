from typing import Any

import jax.numpy as jnp
import numpy as np


# Checks of the fields of formats, which say what was wrong and what would do.


def check_choice(name: str, value: Any, *choices: Any) -> None:
    """Raises a `ValueError` unless a field has one of several values."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(
            f"`{name}` should be {', '.join(others)} or {last}. Got {value!r}."
        )


def check_boolean(name: str, value: Any) -> None:
    """Raises a `TypeError` unless a field is true or false."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` should be True or False. Got {value!r}.")


def as_dtype(dtype: Any, wanted: str) -> np.dtype:
    """Returns a dtype. Raises a `TypeError` that begins with `wanted` if it is none."""
    if dtype is None:  # (NumPy takes it for float64.)
        raise TypeError(f"{wanted} None.")
    try:
        return jnp.dtype(dtype)
    except TypeError as e:
        raise TypeError(f"{wanted} {dtype!r}.") from e


def check_integer(
    name: str, value: Any, low: int, high: int, meaning: str = ""
) -> None:
    """Raises a `TypeError` unless a field is an integer, and a `ValueError` if it is
    out of range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"`{name}` should be an integer from {low} to {high}{meaning}. Got "
            f"{value!r}, of type {type(value).__name__}."
        )
    if not low <= value <= high:
        raise ValueError(
            f"`{name}` should be from {low} to {high}{meaning}. Got {value}."
        )


def check_scale(scale: Any, block_size: int | None) -> None:
    """Raises a `ValueError` unless a field says whether all rows share their scale, or
    if blocks are to share it, too."""
    check_choice("scale", scale, "channel", "tensor")
    if scale == "tensor" and block_size is not None:
        raise ValueError(
            "One scale of the whole matrix has no blocks: with `scale='tensor'`, "
            f"`block_size` should be None. Got {block_size}."
        )
