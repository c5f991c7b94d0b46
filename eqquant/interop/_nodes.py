from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._array import has_numbers, is_quantized


# Of `jtu.DictKey` and `jtu.SequenceKey`.
Path: TypeAlias = tuple[Any, ...]


def children(node: PyTree) -> dict[Hashable, PyTree] | list[PyTree] | None:
    """The children of a node of a PyTree: a list for a sequence, and otherwise a
    dictionary, in which attributes go by their names. `None` for a leaf."""
    if node is None or is_quantized(node):
        return None
    found, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(found) == 1 and found[0][0] == ():
        return None
    keys, nodes = [key for (key,), _ in found], [child for _, child in found]
    # Without children, the keys do not tell.
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
    """Each leaf, quantized arrays among them, in the order of `jax.tree.leaves`."""
    found = children(node)
    if found is not None:
        for key, child in keyed(found):
            yield from leaves(child, (*path, key))
    elif node is not None:
        yield path, node


def keyed(found: dict[Hashable, PyTree] | list[PyTree]) -> list[tuple[Any, PyTree]]:
    """Children with their keys in a path."""
    if isinstance(found, list):
        return [(jtu.SequenceKey(i), child) for i, child in enumerate(found)]
    return [(jtu.DictKey(name), child) for name, child in found.items()]


def plain_key(key: Any) -> Any:
    """A key in a path, as it is in `children`."""
    return key.idx if isinstance(key, jtu.SequenceKey) else key.key


def is_data(leaf: Any) -> bool:
    """Whether a leaf is an array, a struct of one, or a scalar."""
    if is_quantized(leaf):
        return has_numbers(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return True
    return eqx.is_array(leaf) or python_scalar(leaf) is not None


def python_scalar(leaf: Any) -> type | None:
    """The type of a Python scalar, which `numpy.float64` also is, or else `None`."""
    if type(leaf) in (bool, int):
        return type(leaf)
    return next((cls for cls in (float, complex) if isinstance(leaf, cls)), None)


def kind_of_numpy(leaf: Any) -> Literal["array", "scalar"] | None:
    """Whether a leaf is a NumPy array or scalar, to be loaded as such.

    **Raises:**

    A `ValueError` for a masked array.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueError("it should be an array without a mask. Save that beside it.")
    if isinstance(leaf, np.ndarray):
        return "array"
    return "scalar" if isinstance(leaf, np.generic) else None


def dotted(path: Path) -> str:
    """A path as text: `"layers.0.weight"`."""
    return jtu.keystr(path, simple=True, separator=".")


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, quantized or not, and no number of Python."""
    return is_data(leaf) and python_scalar(leaf) is None


def by_name(
    tree: PyTree, argument: str, wanted: Callable[[Any], bool]
) -> dict[str, Any]:
    """The leaves that are wanted, by their paths as text.

    **Raises:**

    A `ValueError` that names the `argument`, if two have the same.
    """
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
