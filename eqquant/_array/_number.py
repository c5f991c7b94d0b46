from typing import Any

import numpy as np


def check_number(name: str, value: Any, *, whole: bool = False) -> None:
    """Raises a `TypeError` unless an argument is a number, or a whole one. (The caller
    checks its range.)"""
    kinds = (int, np.integer) if whole else (int, float, np.number)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "an integer" if whole else "a number"
        raise TypeError(f"`{name}` should be {kind}. Got {value!r}.")
