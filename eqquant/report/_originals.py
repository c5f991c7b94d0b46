from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._owners import LeafInfo, leaves_with_info
from ._short import short_array


def originals(dense: PyTree, model: PyTree, infos: Sequence[LeafInfo]) -> list[Any]:
    """The arrays of `dense` that stand where those of `model` do.

    **Raises:**

    A `ValueError` if there are no such, or if either has only structs of arrays.
    """
    for keys, leaf in jtu.tree_leaves_with_path((model, dense)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            path = jtu.keystr(keys[1:], simple=True, separator=".")
            raise ValueError(
                "To compare `dense` with `model`, both should have their arrays. Got a "
                f"`jax.ShapeDtypeStruct` at `{path}`."
            )
    wanted = "`dense` should be the model as it was before it was quantized."
    arrays = [
        (leaf, info) for leaf, info in leaves_with_info(dense) if info is not None
    ]
    theirs = [info.path for _, info in arrays]
    ours = [info.path for info in infos]
    if theirs != ours:
        our, their = next((a, b) for a, b in zip_longest(ours, theirs) if a != b)
        path = their if our is None or our in theirs else our
        raise ValueError(f"{wanted} Got one whose paths first differ at `{path}`.")
    for (_, was), now in zip(arrays, infos):
        if was.shape != now.shape or is_floating(was) != is_floating(now):
            raise ValueError(
                f"{wanted} Got {_array(was)} at `{was.path}`, where `model` has "
                f"{_array(now)}."
            )
    return [leaf for leaf, _ in arrays]


def is_floating(info: LeafInfo) -> bool:
    return jnp.issubdtype(info.dtype, jnp.floating)


def _array(info: LeafInfo) -> str:
    return short_array(info.shape, info.dtype.name)
