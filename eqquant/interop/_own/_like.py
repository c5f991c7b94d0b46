from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding
from jaxtyping import PyTree

from ..._array import is_quantized, QuantizedArray
from ..._product import as_tuple
from ..._tree import printable
from ...formats import Layout
from .._nodes import dotted, is_data, leaves, python_scalar


def match(
    found: PyTree, like: PyTree, kind_of_numpy: Callable[[Any], str | None]
) -> list[tuple[Any, Any]]:
    """Pairs the leaf of `found`, the skeleton from a file, at each place with the leaf
    of `like`, in the order of `like`. A leaf that is not data is paired with itself.
    `kind_of_numpy` tells whether a leaf of `found` is a NumPy `"array"` or `"scalar"`.
    Raises a `ValueError` that lists each leaf that is missing, unexpected, or of
    another shape or dtype."""
    expected = {path: leaf for path, leaf in leaves(like) if is_data(leaf)}
    got = _at_places_of(expected, dict(leaves(found)))
    paths = [*expected, *(path for path in got if path not in expected)]
    problems = [
        f"\n- {printable(dotted(path)) or 'as a whole'}: expected "
        f"{_text(expected.get(path))}, got {_text(got.get(path))}."
        for path in paths
        if not _fits(got.get(path), expected.get(path), kind_of_numpy)
    ]
    if problems:
        named = all(path in got and path in expected for path in paths)
        hint = "" if named else " (`eqquant.interop.load_into` can rename arrays)"
        raise ValueError(f"it does not match `like`{hint}:{''.join(problems)}")
    return [(got.get(path, leaf), leaf) for path, leaf in leaves(like)]


def _at_places_of(expected, got):
    # Converted files have only dotted names, which do not distinguish the indices of a
    # list with gaps from the keys of a dictionary.
    places: dict[str, list[Any]] = {}
    for path in expected.keys() - got.keys():
        places.setdefault(dotted(path), []).append(path)

    def place(path):
        if path in expected or not all(map(_is_of_name, path)):
            return path
        found = places.pop(dotted(path), [])
        return found[0] if len(found) == 1 else path

    return {place(path): leaf for path, leaf in got.items()}


def _is_of_name(key):
    return not isinstance(key, jtu.DictKey) or isinstance(key.key, str)


def named_sharding(leaf: Any) -> NamedSharding | None:
    """Returns the sharding of a leaf of `like` if it is on a mesh: the sharding of its
    arrays or, for a skeleton, the declared one. Raises a `ValueError` if it is on an
    abstract mesh, as in `jax.eval_shape`, other than the mesh of `jax.set_mesh`."""
    arrays = jtu.tree_leaves(leaf.stored) if is_quantized(leaf) else [leaf]
    if not all(map(_has_sharding, arrays)):
        return None
    sharding = leaf.placement if is_quantized(leaf) else leaf.sharding
    if sharding is None and is_quantized(leaf):
        # A skeleton has only a declared sharding.
        sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    if not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.abstract_mesh != sharding.mesh:
        raise ValueError(
            f"`like` is placed on {sharding.mesh}, whose devices are not known. Load "
            "it inside `with jax.set_mesh(mesh):`."
        )
    return NamedSharding(mesh, sharding.spec)


def layout(leaf: Any, q: QuantizedArray) -> Layout:
    """Returns the layout for an array of a file: the layout of a leaf of `like` with
    the same codes, or else the layout of [`eqquant.quantize`][]."""
    format = q.format.prepacked("cpu")
    if is_quantized(leaf) and leaf.format.prepacked("cpu") == format:
        return leaf.layout
    return Layout(format).preferred(q.ndim - len(as_tuple(q.axis)) + 1)


def _has_sharding(x):
    if isinstance(x, Tracer):
        return False
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _fits(found, like, kind_of_numpy):
    if _type(found) == _type(like):
        return True
    if found is None or like is None:
        return False
    kind, scalar = kind_of_numpy(found), python_scalar(like)
    if kind == "scalar" and scalar is not None:
        # (`numpy.float64` is also a Python float.)
        return issubclass(found.dtype.type, scalar)
    if kind is not None and isinstance(like, jax.ShapeDtypeStruct):
        # A skeleton has the dtypes to which JAX would convert.
        dtype = jax.dtypes.canonicalize_dtype(found.dtype)
        return (found.shape, dtype) == _type(like)
    return False


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
