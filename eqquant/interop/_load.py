import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax.tree_util as jtu
import safetensors
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._array import is_quantized
from .._axes import as_tuple
from ._header import damaged, from_header
from ._like import laid_as, match, named_sharding
from ._skeleton import Skeleton, to_skeleton
from ._tensors import from_tensor


def load(path: str | os.PathLike[str], like: PyTree = None) -> PyTree:
    """Reads what [`eqquant.save`][] wrote. All of it comes back bit for bit.

    !!! Example

        ```python
        skeleton = eqx.filter_eval_shape(make_model, key)
        model = eqquant.load("model.safetensors", like=skeleton)
        ```

    **Arguments:**

    - `path`: of the file.
    - `like`: a PyTree of the same structure, such as another model of the same class:
        with its arrays or, as `eqx.filter_eval_shape` makes it, without. Which of them
        are quantized is for the file to say. Functions, and other leaves that are not
        data, are taken from it; and where it has an array with a `NamedSharding`, what
        is loaded is placed in the same way. So does a quantized array come back in the
        layout that it has there, by [`eqquant.tree_prepack`][]. A layer that was
        quantized with `unsupported="on_call"` has to be such a layer there, too.

    **Returns:**

    A PyTree like `like`. Without that, one of dictionaries and lists, in which
    attributes go by their names. NumPy's arrays come back as JAX's.

    **Raises:**

    A `ValueError` if this is not a file of ours, or a damaged one; if it has a format
    that is not known; if it has 64-bit numbers and JAX is not to use them; or if it
    differs from `like`, with every place where it does. A `FileNotFoundError` if there
    is no file.
    """
    path = os.fspath(path)
    with _naming(path), _opened(path) as file:
        reader = _Reader(file)
        if like is None:
            return _map(reader.leaf, reader.skeleton.tree)
        pairs = match(reader.skeleton.tree, like)
        leaves = [
            laid_as(leaf, reader.leaf(found, named_sharding(leaf)))
            for found, leaf in pairs
        ]
        treedef = jtu.tree_structure(like, is_leaf=is_quantized)
        return jtu.tree_unflatten(treedef, leaves)


class _Reader:
    """Puts arrays in the place of structs. Each is read once."""

    def __init__(self, file: Any):
        self.skeleton = _checked_skeleton(file)
        self._file = file
        named = [*self.skeleton.arrays.items(), *self.skeleton.quantized.items()]
        self._names = {id(x): name for name, x in named}
        self._done: dict[Any, Any] = {}

    def leaf(self, x: Any, sharding: NamedSharding | None = None) -> Any:
        if id(x) not in self._names:
            return x
        read = self._quantized if is_quantized(x) else self._array
        return self._once(read, x, sharding)

    def _once(self, read, x, *args):
        key = (read, id(x), *args)
        if key not in self._done:
            self._done[key] = read(x, *args)
        return self._done[key]

    def _array(self, x, sharding=None):
        name = self._names[id(x)]
        tensor = self._file.get_tensor(name)
        return from_tensor(self.skeleton.types[name], tensor, sharding)

    def _swapped(self, x):
        return self._array(x).swapaxes(-1, -2)

    def _quantized(self, q, sharding):
        name = self._names[id(q)]
        # From the rows of a file to how they are to lie in memory.
        row_axis = q.format.row_axis if q.ndim > len(as_tuple(q.axis)) else -2
        q = dataclasses.replace(q, row_axis=row_axis)
        read = self._array if row_axis == -2 else self._swapped
        if sharding is None:
            stored = _map(lambda x: self._once(read, x), q.stored)
            return dataclasses.replace(q, stored=stored)
        # Not kept: only until they are placed are they whole on one device.
        whole = dataclasses.replace(q, stored=_map(read, q.stored))
        try:
            return whole.with_sharding(sharding)
        except ValueError as e:
            raise ValueError(f"`{name}` could not be placed as in `like`. {e}") from e


def _map(fn, node):
    if isinstance(node, dict):
        return {key: _map(fn, child) for key, child in node.items()}
    if isinstance(node, list):
        return [_map(fn, child) for child in node]
    return fn(node)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as e:
        raise ValueError(f"Could not load {path!r}: {e}") from e


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    with open(path, "rb") as file:
        start = file.read(9)
    try:
        file = safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as e:
        # The size of the header comes first, in eight bytes, and then its JSON.
        if start[8:] == b"{":
            raise damaged("it is cut short, or its header is damaged", e) from e
        raise ValueError(
            "it is not a safetensors file, as `eqquant.save` writes, or only the "
            f"beginning of one ({e}). Is it the right file, and all of it?"
        ) from e
    with file:
        yield file


def _checked_skeleton(file: Any) -> Skeleton:
    layout = from_header(file.metadata())
    try:
        skeleton = to_skeleton(layout)
    except (AssertionError, AttributeError, LookupError, TypeError) as e:
        raise damaged("its metadata is damaged", repr(e)) from e
    tensors = {}
    for name in file.keys():
        tensor = file.get_slice(name)
        tensors[name] = (tensor.get_dtype(), tuple(tensor.get_shape()))
    expected = {name: type.tensor_type for name, type in skeleton.types.items()}
    for name in {**expected, **tensors}:
        if expected.get(name) != tensors.get(name):
            raise damaged(
                "its tensors are not those that its metadata tells of",
                f"{name!r} should be {expected.get(name)}, and is {tensors.get(name)}",
            )
    return skeleton
