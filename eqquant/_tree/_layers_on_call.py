from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import is_quantized
from ._on_call import is_on_call, put_on_call, rebuilt
from ._owners import leaves_with_info, needing_dense


def layers_on_call(
    model: PyTree, is_weight: Callable[[Any], bool] = is_quantized
) -> PyTree:
    """Makes Equinox layers that need dense arrays, such as convolutions, run through
    [`eqquant.implicit`][] if their weights are quantized, or satisfy `is_weight`. A
    layer inside a module that runs so stays as it is."""
    callers = {}
    for leaf, info in leaves_with_info(model, is_weight):
        if not is_weight(leaf) or info is None:
            continue
        layer = needing_dense(info)
        if layer is not None and not any(map(is_on_call, info.ancestors)):
            callers[id(layer)] = False
    if not callers:
        return model
    leaves = jtu.tree_leaves(model, is_leaf=is_weight)
    return rebuilt(model, leaves, put_on_call(callers), is_weight)
