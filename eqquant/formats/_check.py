from typing import Any

import numpy as np


# Checks of the fields of formats, which say what was wrong and what would do.


def check_choice(name: str, value: Any, *choices: Any) -> None:
    """Raises a `ValueError` unless a field has one of several values."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(
            f"`{name}` should be {', '.join(others)} or {last}. Got {value!r}."
        )


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
