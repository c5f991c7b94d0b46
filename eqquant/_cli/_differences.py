import math
from typing import Any, NamedTuple


# The number of elements compared at once, to save memory.
_numbers = 2**22


class Difference(NamedTuple):
    """The difference between two arrays.

    - `is_exact`: whether all numbers are equal. (NaN is equal to NaN.)
    - `sqnr`: the signal-to-quantization-noise ratio in decibels.
    - `largest`: the largest absolute error.
    """

    is_exact: bool
    sqnr: float
    largest: float


def difference(x: Any, y: Any) -> Difference:
    """Compares an array `y` with the reference `x`, of the same shape and of any
    dtypes. Neither is rounded for this."""
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        pairs = [_apart(a, b) for a, b in _pieces(x, y)]
        is_exact = all(equal for _, _, equal in pairs)
        if is_exact:
            return Difference(True, math.inf, 0.0)
        peaks = [np.max([p[i] for p in pairs]) for i in (0, 1)]
        sums = np.zeros(2)
        for a, b in _pieces(x, y):
            for i, z in enumerate(_signal_and_noise(a, b)):
                sums[i] += np.sum((z / (peaks[i] or 1)) ** 2)
        # The sums are of squared ratios to the peaks, so that squares neither overflow
        # nor vanish.
        with np.errstate(divide="ignore"):
            ratios = 10 * np.log10(sums) + 20 * np.log10(peaks)
        return Difference(False, float(ratios[0] - ratios[1]), float(peaks[1]))


def _pieces(x, y):
    import numpy as np

    x, y = (np.asarray(z).reshape(-1) for z in (x, y))
    for i in range(0, x.size, _numbers):
        yield _wide(x[i : i + _numbers]), _wide(y[i : i + _numbers])


def _wide(x):
    # Converts to a dtype that represents all values of the dtype of `x`. Python's
    # integers have no limit.
    import numpy as np

    if x.dtype in (np.int64, np.uint64):
        return x.astype(object)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _apart(x, y):
    import numpy as np

    signal, noise = _signal_and_noise(x, y)
    return np.max(signal), np.max(noise), bool(np.all(_equal(x, y)))


def _signal_and_noise(x, y):
    # The magnitudes of `x` and of `x - y`. Both are zero where both arrays are infinite
    # or NaN.
    import numpy as np

    signal = np.abs(x).astype(np.float64)
    noise = np.abs(x - y).astype(np.float64)
    equal = _equal(x, y)
    return np.where(equal & ~np.isfinite(signal), 0, signal), np.where(equal, 0, noise)


def _equal(x, y):
    # (NaN differs from itself.)
    return ((x == y) | ((x != x) & (y != y))).astype(bool)
