from typing import Any

import numpy as np


def check_size(name: str, value: Any) -> None:
    """Raises a `TypeError` unless an argument is a number of elements."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"`{name}` should be a number of elements. Got {value!r}.")
