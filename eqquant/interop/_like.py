from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._array import is_quantized
from .._prepack import relaid
from ._nodes import dotted, is_data, leaves, python_scalar


def match(found: PyTree, like: PyTree) -> list[tuple[Any, Any]]:
    """For each leaf of `like`, in order: the leaf of `found` at the same place, or
    itself if it is not data; and itself.

    **Raises:**

    A `ValueError` that tells of every leaf that is missing, or not expected, or of
    another shape or dtype.
    """
    got = dict(leaves(found))
    expected = {path: leaf for path, leaf in leaves(like) if is_data(leaf)}
    paths = [*expected, *(path for path in got if path not in expected)]
    problems = [
        f"\n- {dotted(path) or 'as a whole'}: expected "
        f"{_text(expected.get(path))}, got {_text(got.get(path))}."
        for path in paths
        if _type(expected.get(path)) != _type(got.get(path))
    ]
    if problems:
        raise ValueError(f"it does not match `like`:{''.join(problems)}")
    return [(got.get(path, leaf), leaf) for path, leaf in leaves(like)]


def named_sharding(leaf: Any) -> NamedSharding | None:
    """How a leaf of `like` is placed, if that is over a mesh."""
    arrays = jtu.tree_leaves(leaf.stored) if is_quantized(leaf) else [leaf]
    if not all(map(_is_concrete, arrays)):
        return None
    sharding = leaf.placement if is_quantized(leaf) else leaf.sharding
    return sharding if isinstance(sharding, NamedSharding) else None


def laid_as(leaf: Any, x: Any) -> Any:
    """What was loaded, in the layout of a leaf of `like`, if both are in one format."""
    if is_quantized(leaf) and is_quantized(x):
        if leaf.format.prepacked("cpu") == x.format:
            return relaid(x, leaf.format, leaf.row_axis)
    return x


def _is_concrete(x):
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _type(leaf):
    if leaf is None:
        return None
    scalar = python_scalar(leaf)
    return (leaf.shape, leaf.dtype) if scalar is None else scalar


def _text(leaf):
    if leaf is None:
        return "nothing"
    scalar = python_scalar(leaf)
    if scalar is not None:
        return f"{scalar.__name__} {leaf!r}"
    text = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return f"{text} in {leaf.format}" if is_quantized(leaf) else text
