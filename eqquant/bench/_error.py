import numpy as np
from jaxtyping import Float


# The number of columns multiplied at a time, which limits the copies in float64.
_columns = 1024


def product_error(
    y: Float[np.ndarray, "m n"],
    x: Float[np.ndarray, "m k"],
    w: Float[np.ndarray, "k n"],
) -> float:
    """Returns the largest error of `y = x @ w`, relative to `|x| @ |w|`, in float64."""
    x = x.astype(np.float64)
    largest = 0.0
    for start in range(0, w.shape[1], _columns):
        columns = slice(start, start + _columns)
        part = w[:, columns].astype(np.float64)
        difference = np.abs(y[:, columns].astype(np.float64) - x @ part)
        bound = np.abs(x) @ np.abs(part)
        largest = max(largest, np.max(difference / np.where(bound == 0, 1, bound)))
    return float(largest)


def normal(shape: tuple[int, int], seed: int) -> Float[np.ndarray, "_ _"]:
    """Returns normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def with_outliers(x: Float[np.ndarray, "m k"]) -> Float[np.ndarray, "m k"]:
    """Sets the largest number of each row to 300, like the outliers in the activations
    of large language models."""
    x = x.copy()
    np.put_along_axis(x, np.argmax(np.abs(x), axis=1, keepdims=True), 300, axis=1)
    return x
