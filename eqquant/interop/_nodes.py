from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import has_numbers, is_quantized


# A `jtu.DictKey` or `jtu.SequenceKey`.
Key: TypeAlias = Any
Path: TypeAlias = tuple[Key, ...]


def children(node: PyTree) -> list[tuple[Key, PyTree]] | None:
    """One level of a PyTree: the children of a node, each by a key of a dictionary (or
    by the name of an attribute) or by its place in a sequence. `None` of a leaf."""
    if node is None or is_quantized(node):
        return None
    found, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(found) == 1 and found[0][0] == ():
        return None
    keys = [key for (key,), _ in found]
    if all(isinstance(k, jtu.SequenceKey | jtu.FlattenedIndexKey) for k in keys):
        keys = [jtu.SequenceKey(i) for i in range(len(keys))]
    else:
        keys = [jtu.DictKey(_name(key)) for key in keys]
    if len(set(keys)) != len(keys):
        raise ValueError(
            f"the keys of a {type(node).__name__} should differ. Got {keys}."
        )
    return list(zip(keys, [child for _, child in found]))


def is_sequence(node: PyTree) -> bool:
    """Whether a node, that is not a leaf, is to be a list; a dictionary otherwise."""
    found = children(node)
    if found:
        return isinstance(found[0][0], jtu.SequenceKey)
    return isinstance(node, Sequence)


def leaves(node: PyTree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each leaf, quantized arrays among them, in the order of `jax.tree.leaves`."""
    found = children(node)
    if found is not None:
        for key, child in found:
            yield from leaves(child, (*path, key))
    elif node is not None:
        yield path, node


def is_data(leaf: Any) -> bool:
    """Whether a leaf is numbers, so that it belongs in a file."""
    if is_quantized(leaf):
        return has_numbers(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return True
    return eqx.is_array(leaf) or python_scalar(leaf) is not None


def python_scalar(leaf: Any) -> type | None:
    """The type of a scalar that is one of Python's, as `numpy.float64` is too."""
    if type(leaf) in (bool, int):
        return type(leaf)
    return next((cls for cls in (float, complex) if isinstance(leaf, cls)), None)


def dotted(path: Path) -> str:
    return jtu.keystr(path, simple=True, separator=".")


def _name(key: Any) -> Hashable:
    if isinstance(key, jtu.DictKey):
        return key.key
    return key.name if isinstance(key, jtu.GetAttrKey) else str(key)
