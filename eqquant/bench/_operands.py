import numpy as np
from jaxtyping import Float


def normal(shape: tuple[int, int], seed: int) -> Float[np.ndarray, "_ _"]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def with_outliers(x: Float[np.ndarray, "m k"]) -> Float[np.ndarray, "m k"]:
    """The same with one number in each row set to 300, as in the activations of large
    language models. It is the largest of the row otherwise, so that no other changes
    what the row is like."""
    x = x.copy()
    np.put_along_axis(x, np.argmax(np.abs(x), axis=1, keepdims=True), 300, axis=1)
    return x
