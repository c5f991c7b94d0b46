from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._array import has_numbers, is_quantized


# A path of `jtu.DictKey`s and `jtu.SequenceKey`s.
Path: TypeAlias = tuple[Any, ...]


def children(node: PyTree) -> dict[Hashable, PyTree] | list[PyTree] | None:
    """Returns the children of a node of a PyTree: a list for a sequence, or else a
    dictionary, with the names of attributes as keys. Returns `None` for a leaf."""
    if node is None or is_quantized(node):
        return None
    found, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(found) == 1 and found[0][0] == ():
        return None
    keys, nodes = [key for (key,), _ in found], [child for _, child in found]
    # Without children, there are no keys that identify a sequence.
    is_sequence = bool(keys) or isinstance(node, Sequence)
    if is_sequence and all(isinstance(key, _indices) for key in keys):
        return nodes
    names = [_name(key) for key in keys]
    if len(set(names)) != len(names):
        raise ValueError(
            f"the keys of a {type(node).__name__} should differ. Got {names}."
        )
    return dict(zip(names, nodes))


_indices = (jtu.SequenceKey, jtu.FlattenedIndexKey)


def leaves(node: PyTree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields each leaf with its path, in the order of `jax.tree.leaves`. Quantized
    arrays are leaves."""
    found = children(node)
    if found is not None:
        for key, child in keyed(found):
            yield from leaves(child, (*path, key))
    elif node is not None:
        yield path, node


def keyed(found: dict[Hashable, PyTree] | list[PyTree]) -> list[tuple[Any, PyTree]]:
    """Returns children with their keys in a path."""
    if isinstance(found, list):
        return [(jtu.SequenceKey(i), child) for i, child in enumerate(found)]
    return [(jtu.DictKey(name), child) for name, child in found.items()]


def plain_key(key: Any) -> Any:
    """Returns the index or the name of a key in a path, as in `children`."""
    return key.idx if isinstance(key, jtu.SequenceKey) else key.key


def is_data(leaf: Any) -> bool:
    """Whether a leaf is an array, a struct of one, or a scalar."""
    if is_quantized(leaf):
        return has_numbers(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return True
    return eqx.is_array(leaf) or python_scalar(leaf) is not None


def python_scalar(leaf: Any) -> type | None:
    """Returns the type of a Python scalar, including `numpy.float64`, or else
    `None`."""
    if type(leaf) in (bool, int):
        return type(leaf)
    return next((cls for cls in (float, complex) if isinstance(leaf, cls)), None)


def kind_of_numpy(leaf: Any) -> Literal["array", "scalar"] | None:
    """Returns whether a leaf is a NumPy array or a NumPy scalar, or `None` for others.
    Raises a `ValueError` for a masked array."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueError("it should be an array without a mask. Save that beside it.")
    if isinstance(leaf, np.ndarray):
        return "array"
    return "scalar" if isinstance(leaf, np.generic) else None


def dotted(path: Path) -> str:
    """Returns a path as text: `"layers.0.weight"`."""
    return jtu.keystr(path, simple=True, separator=".")


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, quantized or not, and not a Python scalar."""
    return is_data(leaf) and python_scalar(leaf) is None


def by_name(
    tree: PyTree, argument: str, wanted: Callable[[Any], bool]
) -> dict[str, Any]:
    """Returns the leaves for which `wanted` is true, by their paths as text. Raises a
    `ValueError` that names the `argument`, if two leaves have the same path."""
    found: dict[str, Any] = {}
    for path, leaf in leaves(tree):
        name = dotted(path)
        if wanted(leaf) and name in found:
            raise ValueError(
                f"`{argument}` should have different names for all arrays. Got "
                f"{name!r} twice, since one of its keys has a dot."
            )
        if wanted(leaf):
            found[name] = leaf
    return found


def _name(key: Any) -> Hashable:
    if isinstance(key, jtu.DictKey):
        return key.key
    return key.name if isinstance(key, jtu.GetAttrKey) else str(key)
