from typing import Any, Literal

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._array import AbstractArrayLike, is_quantized
from .._tree import decide, Decision, FilterSpec
from ..formats import AbstractFormat, as_format, Int8
from ._low_precision import LowPrecision
from ._low_precision_product import Compute
from ._operand import Rounding
from ._points import as_rounding
from ._stochastic import Stochastic


def tree_compute(
    model: PyTree,
    filter_spec: FilterSpec = True,
    forward: AbstractFormat | str = Int8(),
    *,
    backward: Any = None,
    axis: int | Literal["auto"] = "auto",
    min_size: int = 1024,
    embeddings: bool = False,
    strict: bool = True,
) -> PyTree:
    decisions = decide(
        model,
        filter_spec,
        as_rounding(forward),
        axis,
        min_size,
        embeddings,
        "skip",
        strict,
        is_done=_is_done,
    )
    pair = backward if isinstance(backward, tuple) else (backward, backward)
    to_input, to_weight = map(_as_rounding, pair)
    new = [_one(d, to_input, to_weight) for d in decisions]
    treedef = jtu.tree_structure(model, is_leaf=_is_done)
    return jtu.tree_unflatten(treedef, new)


def _one(decision, to_input, to_weight):
    if decision.format is None:
        return decision.leaf
    format = as_rounding(decision.format)
    compute = Compute(format, format, to_input, to_weight)
    return LowPrecision(decision.leaf, None, decision.info.axis, compute)


def _is_done(x):
    return isinstance(x, AbstractArrayLike)


def _as_rounding(x):
    if x is None or isinstance(x, Stochastic):
        return x
    if isinstance(x, (str, AbstractFormat)):
        return as_rounding(x)
    return jnp.dtype(x)


def tree_preround(model: PyTree) -> PyTree:
    is_leaf = lambda x: isinstance(x, LowPrecision)
    return jtu.tree_map(lambda x: x.preround() if is_leaf(x) else x, model, is_leaf=is_leaf)
