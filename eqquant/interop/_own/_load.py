import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..._array import is_quantized, QuantizedArray, relaid
from ..._product import as_tuple, full_spec
from ..._tree import (
    is_on_call,
    layers_on_call,
    not_on_call,
    on_call,
    printable,
    rebuilt,
)
from .._containers import Container, open_container, RawTensor
from .._nodes import children
from .._tensors import ArrayType, as_dtype, from_tensor
from ._like import layout, match, named_sharding
from ._skeleton import checked_skeleton, Skeleton


def load(path: str | os.PathLike[str], like: PyTree = None) -> PyTree:
    """Loads a PyTree that [`eqquant.save`][] wrote, bit for bit.

    !!! Example

        ```python
        skeleton = eqx.filter_eval_shape(make_model, key)
        model = eqquant.load("model.safetensors", like=skeleton)
        ```

    **Arguments:**

    - `path`: the file, or the folder or index of several files that
        [`eqquant.interop.convert`][] wrote.
    - `like`: a PyTree of the same structure, such as another model of the same class,
        or its structs from `eqx.filter_eval_shape`. The file decides which arrays are
        quantized. (Numbers in the names of arrays that `convert` wrote may be indices
        of lists.) Functions and other leaves that are not data are taken from `like`.
        Where `like` has an array or a skeleton with a `NamedSharding`, the loaded array
        gets the same sharding, and each process reads only the shards of its own
        devices. A quantized array also gets the memory layout that it has in `like`
        (see [`eqquant.tree_prepack`][]), or else the layout for CPUs. Modules that ran
        under [`eqquant.implicit`][] when they were saved, because of
        `unsupported="on_call"` or an `example`, do so again, even if `like` is dense.
        So do Equinox layers that need dense arrays, such as convolutions, if their
        weights are quantized. (Files of `convert`, and of earlier versions, do not
        record other such modules. If there are any, `like` must be a model, or a
        skeleton, that is quantized in the same way.)

    **Returns:**

    A PyTree like `like`. Without `like`, a tree of dictionaries and lists, with the
    names of attributes as keys. NumPy arrays and scalars load as such, with their
    dtypes, or as JAX arrays where `like` gives a sharding.

    **Raises:**

    A `ValueError` if the file was not written by `save`, is damaged, or needs a later
    version of this library; if it has an unknown format; if it has 64-bit JAX arrays
    and these are disabled; or if it differs from `like`, listing every difference. A
    `FileNotFoundError` if there is no file.
    """
    with _opened(path) as file:
        reader = _Reader(file)
        if like is None:
            return _map(reader.leaf, reader.skeleton.tree)
        pairs = match(reader.skeleton.tree, like, reader.kind_of_numpy)
        leaves = [reader.leaf(found, leaf) for found, leaf in pairs]
        model = rebuilt(like, leaves, on_call_as(reader.skeleton.on_call, like))
        return layers_on_call(model)


def load_struct(path: str | os.PathLike[str]) -> PyTree:
    """Loads the tree in a file, with a `jax.ShapeDtypeStruct` in the place of each
    array. Only the header is read."""
    with _opened(path) as file:
        return _skeleton(file).tree


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Container]:
    file = open_container(path)
    with contextlib.closing(file):
        try:
            yield file
        except ValueError as e:
            raise ValueError(f"Could not load {os.fspath(path)!r}: {e}") from e


def _skeleton(file: Container) -> Skeleton:
    return checked_skeleton({} if file.is_gguf else file.metadata, file.tensors)


class _Reader:
    """Replaces structs by arrays, and reads each array once."""

    def __init__(self, file: Container):
        self.skeleton = _skeleton(file)
        self._tensors = file.tensors
        named = [*self.skeleton.arrays.items(), *self.skeleton.quantized.items()]
        self._names = {id(x): name for name, x in named}
        self._done: dict[Any, Any] = {}

    def leaf(self, x: Any, like: Any = None) -> Any:
        """Returns the array for a leaf of the skeleton, with the sharding and the
        memory layout of a leaf of `like`."""
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
        """Returns whether a leaf of the skeleton is a NumPy `"array"` or `"scalar"`, or
        `None`."""
        return self.skeleton.numpy.get(self._names.get(id(x), ""))

    def _once(self, read, *args):
        if (read, args) not in self._done:
            self._done[read, args] = read(*args)
        return self._done[read, args]

    def _array(self, name, sharding, swapped=False):
        type, tensor = self.skeleton.types[name], self._tensors[name]
        return _read_array(type, tensor, sharding, swapped)

    def _numpy(self, name, kind):
        x = from_tensor(self.skeleton.types[name], self._tensors[name].read())
        return x[()] if kind == "scalar" else np.array(x)

    def _quantized(self, name, sharding, layout):
        q = self.skeleton.quantized[name]
        swapped = layout.row_axis != q.layout.row_axis
        names = jtu.tree_map(lambda x: self._names[id(x)], q.stored)
        if swapped:
            stored = jtu.tree_map(_swapped_struct, q.stored)
            laid = dataclasses.replace(q.layout, row_axis=layout.row_axis)
            q = dataclasses.replace(q, stored=stored, layout=laid)
        if sharding is not None:
            # Bytes that pack another number of codes may be split at other places.
            same = layout.format == q.format
            q = _placed(name, q, sharding if same else _whole_along(sharding, q))
        read = lambda name, x: self._once(self._array, name, x.sharding, swapped)
        q = dataclasses.replace(q, stored=jtu.tree_map(read, names, q.stored))
        q = relaid(q, layout)
        return q if sharding is None else _placed(name, q, sharding)


def _read_array(
    type: ArrayType, tensor: RawTensor, sharding: NamedSharding | None, swapped: bool
) -> Array:
    # Each device's shard is read by itself. The last two axes are swapped on the way.
    shape, dtype = type.data.shape, as_dtype(type.data.dtype)
    if swapped:
        shape = _swapped(shape)

    def read(index):
        part = from_tensor(type, _part(tensor, _swapped(index) if swapped else index))
        return part.swapaxes(-1, -2) if swapped else part

    if sharding is None:
        data = jax.device_put(read((slice(None),) * len(shape)))
    else:
        if type.implementation is not None:
            # The data of a key have one more axis.
            sharding = sharding.update(spec=full_spec(sharding.spec, len(shape)))
        data = jax.make_array_from_callback(shape, sharding, read, dtype)
    if type.implementation is None:
        return data
    return jax.random.wrap_key_data(data, impl=type.implementation)


def _part(tensor: RawTensor, index: tuple[slice, ...]) -> np.ndarray:
    # Copy it, because the memory map changes with its file, and JAX may use it without
    # copying.
    return np.array(tensor.read()[index], order="C")


def _placed(name, q, sharding):
    try:
        return q.with_sharding(sharding)
    except ValueError as e:
        raise ValueError(
            f"`{printable(name)}` could not be placed as in `like`. {e}"
        ) from e


def _whole_along(sharding: NamedSharding, q: QuantizedArray) -> NamedSharding:
    # Returns the sharding without splits along the contracted axes.
    spec = list(full_spec(sharding.spec, q.ndim))
    for i in as_tuple(q.axis):
        spec[i] = None
    return sharding.update(spec=PartitionSpec(*spec))


def _swapped(entries):
    *lead, i, j = entries
    return (*lead, j, i)


def _swapped_struct(x):
    return jax.ShapeDtypeStruct(_swapped(x.shape), x.dtype)


def _map(fn, node):
    if isinstance(node, dict):
        return {key: _map(fn, child) for key, child in node.items()}
    if isinstance(node, list):
        return [_map(fn, child) for child in node]
    return fn(node)


def on_call_as(
    found: Mapping[tuple[Any, ...], bool], like: PyTree
) -> Callable[[Any, Any], Any]:
    """Returns a function for `rebuilt` that makes the modules of `like` run on call as
    in a file, by the paths of the modules of the file that run under `implicit`, and
    whether all their methods do. Modules that `like` does not have, or cannot call, are
    of another class, and are left unchanged."""
    # Keyed by identity. The nodes are kept alive, so that no other object gets the same
    # `id`.
    callers = {
        id(node): (node, found[path])
        for path, node in _modules(like)
        if path in found and (found[path] or callable(node))
    }

    def change(node: Any, new: Any) -> Any:
        if id(node) not in callers:
            return new
        _, every_method = callers[id(node)]
        return on_call(not_on_call(new) if is_on_call(new) else new, every_method)

    return change


def _modules(node: PyTree, path: tuple[Any, ...] = ()) -> Iterator[Any]:
    inner = children(node)
    if inner is None:
        return
    if isinstance(node, eqx.Module):
        yield path, node
    pairs = enumerate(inner) if isinstance(inner, list) else inner.items()
    for key, child in pairs:
        yield from _modules(child, (*path, key))
