from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._array import is_quantized


def is_frozen(x: Any) -> bool:
    """Whether training leaves `x` as it is: a [`eqquant.QuantizedArray`][], or another
    leaf that is not an array of floating-point numbers. For filters, and for `is_leaf`:
    it is false for containers.

    !!! Example

        ```python
        def average(old, new):
            return new if eqquant.is_frozen(new) else 0.99 * old + 0.01 * new

        jax.tree.map(average, old_model, new_model, is_leaf=eqquant.is_frozen)
        ```
    """
    if is_quantized(x):
        return True
    return jtu.all_leaves([x]) and not eqx.is_inexact_array(x)
