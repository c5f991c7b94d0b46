import numpy as np
from jaxtyping import Int8


def hadamard(size: int) -> Int8[np.ndarray, "s s"]:
    """Returns a Hadamard matrix, of signs, in Sylvester's order. `size` should be a
    power of two."""
    found = np.ones((1, 1), np.int8)
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found
