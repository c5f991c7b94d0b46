from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
import numpy as np

import eqquant as eqq


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal bit for bit, and in all that is static."""
    leaves_a, tree_a = jtu.tree_flatten(a)
    leaves_b, tree_b = jtu.tree_flatten(b)
    return tree_a == tree_b and all(map(_same_bits, leaves_a, leaves_b))


def _same_bits(a, b):
    if (np.shape(a), a.dtype) != (np.shape(b), b.dtype):
        return False
    a, b = np.asarray(a), np.asarray(b)
    return a.tobytes() == b.tobytes()


def equal(a: Any, b: Any) -> bool:
    """Whether two arrays are of the same shape, dtype and numbers."""
    if eqq.is_quantized(a):
        a = a.dequantize()
    if np.shape(a) != np.shape(b) or a.dtype != b.dtype:
        return False
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=a.dtype != bool)


def refuses(fn: Callable[[], Any]) -> bool:
    try:
        fn()
    except ValueError:
        return True
    return False
