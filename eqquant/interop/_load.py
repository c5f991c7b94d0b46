import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import is_quantized, relaid
from ._header import from_header
from ._layouts import checked_skeleton
from ._like import layout, match, named_sharding
from ._opened import opened
from ._read import read_array, read_numpy
from ._repacked import whole_along
from ._skeleton import Skeleton


def load(path: str | os.PathLike[str], like: PyTree = None) -> PyTree:
    """Reads what [`eqquant.save`][] wrote. All of it comes back bit for bit.

    !!! Example

        ```python
        skeleton = eqx.filter_eval_shape(make_model, key)
        model = eqquant.load("model.safetensors", like=skeleton)
        ```

    **Arguments:**

    - `path`: of the file; or of the folder, or the index, of several that
        [`eqquant.interop.convert`][] wrote.
    - `like`: a PyTree of the same structure, such as another model of the same class:
        with its arrays or, as `eqx.filter_eval_shape` makes it, without. Which of them
        are quantized is for the file to say. Functions, and other leaves that are not
        data, are taken from it; and where it has an array with a `NamedSharding`, or is
        a skeleton with one, what is loaded is placed in the same way: of each array,
        only the parts are read that are for devices of this process. So does a
        quantized array come back in the layout that it has there, by
        [`eqquant.tree_prepack`][]. A layer that was quantized with
        `unsupported="on_call"` has to be such a layer there, too.

    **Returns:**

    A PyTree like `like`. Without that, one of dictionaries and lists, in which
    attributes go by their names. What was an array, or a scalar, of NumPy is one again,
    of the same dtype; but it is JAX's where `like` says how to place it.

    **Raises:**

    A `ValueError` if this is not a file of ours, or a damaged one; if it has a format
    that is not known; if JAX had 64-bit numbers, and is not to use them; or if it
    differs from `like`, with every place where it does. A `FileNotFoundError` if there
    is no file.
    """
    path = os.fspath(path)
    with _naming(path), opened(path) as file:
        reader = _Reader(file)
        if like is None:
            return _map(reader.leaf, reader.skeleton.tree)
        pairs = match(reader.skeleton.tree, like, reader.kind_of_numpy)
        leaves = [reader.leaf(found, leaf) for found, leaf in pairs]
        treedef = jtu.tree_structure(like, is_leaf=is_quantized)
        return jtu.tree_unflatten(treedef, leaves)


def load_struct(path: str | os.PathLike[str]) -> PyTree:
    """What [`eqquant.load`][] would give, with a `jax.ShapeDtypeStruct` in the place of
    each array. No numbers are read."""
    path = os.fspath(path)
    with _naming(path), opened(path) as file:
        return _checked_skeleton(file).tree


class _Reader:
    """Puts arrays in the place of structs. Each is read once."""

    def __init__(self, file: Any):
        self.skeleton = _checked_skeleton(file)
        self._file = file
        named = [*self.skeleton.arrays.items(), *self.skeleton.quantized.items()]
        self._names = {id(x): name for name, x in named}
        self._done: dict[Any, Any] = {}

    def leaf(self, x: Any, like: Any = None) -> Any:
        """What stands for a leaf of the skeleton, placed and laid as a leaf of `like`
        is."""
        if id(x) not in self._names:
            return x
        name, sharding = self._names[id(x)], named_sharding(like)
        if is_quantized(x):
            return self._once(self._quantized, name, sharding, layout(like, x))
        kind = self.kind_of_numpy(x)
        if kind is None or sharding is not None:
            return self._once(self._array, name, sharding)
        return self._once(self._numpy, name, kind)

    def kind_of_numpy(self, x: Any) -> str | None:
        """What a leaf of the skeleton was of NumPy, if anything."""
        return self.skeleton.numpy.get(self._names.get(id(x), ""))

    def _once(self, read, *args):
        if (read, args) not in self._done:
            self._done[read, args] = read(*args)
        return self._done[read, args]

    def _array(self, name, sharding, swapped=False):
        type, tensor = self.skeleton.types[name], self._file.get_slice(name)
        return read_array(type, tensor, sharding, swapped)

    def _numpy(self, name, kind):
        x = read_numpy(self.skeleton.types[name], self._file.get_slice(name))
        return x[()] if kind == "scalar" else x

    def _quantized(self, name, sharding, layout):
        q = self.skeleton.quantized[name]
        swapped = layout.row_axis == -1
        names = _map(lambda x: self._names[id(x)], q.stored)
        stored = _map(lambda x: _swapped(x) if swapped else x, q.stored)
        laid = dataclasses.replace(q.layout, row_axis=layout.row_axis)
        q = dataclasses.replace(q, stored=stored, layout=laid)
        if sharding is not None:
            # Bytes that are packed in another way may be split in another way.
            same = layout.format == q.format
            q = _placed(name, q, sharding if same else whole_along(sharding, q))
        read = lambda name, x: self._once(self._array, name, x.sharding, swapped)
        q = dataclasses.replace(q, stored=jtu.tree_map(read, names, q.stored))
        q = relaid(q, layout)
        return q if sharding is None else _placed(name, q, sharding)


def _placed(name, q, sharding):
    try:
        return q.with_sharding(sharding)
    except ValueError as e:
        raise ValueError(f"`{name}` could not be placed as in `like`. {e}") from e


def _swapped(x):
    *lead, k, n = x.shape
    return jax.ShapeDtypeStruct((*lead, n, k), x.dtype)


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


def _checked_skeleton(file: Any) -> Skeleton:
    layout = from_header(file.metadata())
    tensors = {}
    for name in file.keys():
        tensor = file.get_slice(name)
        tensors[name] = (tensor.get_dtype(), tuple(tensor.get_shape()))
    return checked_skeleton(layout, tensors)
