import itertools as it
import os
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
import safetensors.numpy
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._array import is_quantized
from .._prepack import relaid
from ._formats import format_to_json
from ._header import to_header
from ._nodes import children, dotted, is_data, is_sequence, Path, python_scalar
from ._replacing import replacing
from ._tensors import to_tensor


def save(path: str | os.PathLike[str], m: PyTree) -> None:
    """Writes a model, or any other PyTree, to one safetensors file that describes
    itself. [`eqquant.load`][] reads it.

    !!! Example

        ```python
        model = eqquant.tree_quantize(model)
        eqquant.save("model.safetensors", model)
        ```

    **Arguments:**

    - `path`: of the file. One that is there already is replaced at once and as a whole;
        if anything fails then it is left as it was.
    - `m`: the PyTree. Its arrays are written and its Python scalars; of each quantized
        array, the stored arrays, the format and how it was declared to be sharded (the
        names of axes, not the devices). An array that is in several places is written
        once. Functions, and other leaves that are not data, are not written.

    **Raises:**

    A `ValueError` if an array is being traced, if a part of it is on devices of other
    processes, or if JAX has no such dtype; and if a field of a format, or the key of a
    dictionary, cannot be written.
    """
    writer = _Writer()
    try:
        tree = writer.node(m, ())
    except ValueError as e:
        raise ValueError(f"Could not save `m`{writer.where}: {e}") from e
    header = to_header(
        {"tree": tree, "arrays": writer.arrays, "quantized": writer.quantized}
    )
    with replacing(path) as temporary:
        safetensors.numpy.save_file(writer.tensors, temporary, header)


class _Writer:
    """Collects tensors, and what there is to say of them."""

    def __init__(self):
        self.tensors: dict[str, np.ndarray] = {}
        self.arrays: dict[str, Any] = {}
        self.quantized: dict[str, Any] = {}
        self.where = ""
        # What is written already, by its identity; kept, so that no other has that.
        self._written: dict[int, tuple[str, Any]] = {}
        self._swapped: dict[int, tuple[np.ndarray, Any]] = {}

    def node(self, node: PyTree, path: Path) -> Any:
        self.where = f", at `{dotted(path)}`" if path else ""
        found = children(node)
        if found is None:
            return self._leaf(node, path)
        if is_sequence(node):
            return {"list": [self.node(child, (*path, key)) for key, child in found]}
        found = [(key, child) for key, child in found if _is_written(child)]
        keys = [_key_to_json(key.key) for key, _ in found]
        nodes = [self.node(child, (*path, key)) for key, child in found]
        return {"dict": list(zip(keys, nodes))}

    def _leaf(self, x, path):
        if is_quantized(x):
            if id(x) not in self._written:
                name = _new_name(path, self.quantized)
                self._written[id(x)] = name, x
                self.quantized[name] = self._describe(x, path)
            return {"quantized": self._written[id(x)][0]}
        scalar = python_scalar(x)
        if scalar is complex:
            return {"complex": [x.real, x.imag]}
        if scalar is not None:
            return x
        if is_data(x):
            _check_concrete(x)
            if id(x) not in self._written:
                name = _new_name(path, self.arrays)
                self._written[id(x)] = name, x
                type, self.tensors[name] = to_tensor(x)
                self.arrays[name] = {"dtype": type.dtype, "shape": type.shape}
            return {"array": self._written[id(x)][0]}
        # In a list, what is not written keeps its place.
        return None

    def _describe(self, q, path):
        for x in jtu.tree_leaves(q.stored):
            _check_concrete(x)
        q = relaid(q, q.format.prepacked("cpu"), q.row_axis)
        activation = q.activation
        return {
            "shape": q.shape,
            "dtype": q.dtype.name,
            "format": format_to_json(q.format),
            "activation": None if activation is None else format_to_json(activation),
            "axis": q.axis,
            "tail": q.tail,
            "inner": q.inner,
            "sharding": _spec_to_json(q.sharding),
            "stored": self.node(self._in_rows(q), path),
        }

    def _in_rows(self, q):
        # However they lie in memory. Each is swapped once, so that one that is in
        # several places stays one.
        if q.row_axis == -2:
            return q.stored

        def swapped(x):
            if id(x) not in self._swapped:
                self._swapped[id(x)] = np.asarray(x).swapaxes(-1, -2), x
            return self._swapped[id(x)][0]

        return jtu.tree_map(swapped, q.stored)


def _is_written(node):
    return node is None or is_data(node) or children(node) is not None


def _new_name(path, taken):
    name = dotted(path) or "value"
    names = it.chain([name], (f"{name}#{i}" for i in it.count(2)))
    return next(n for n in names if n not in taken and n != "__metadata__")


def _check_concrete(x):
    if isinstance(x, Tracer):
        raise ValueError("it is being traced. Call `save` outside of `jax.jit`.")
    if not eqx.is_array(x):
        raise ValueError(f"it should be an array, with its numbers. Got {x}.")
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            "a part of it is on devices of other processes. Gather it first, with "
            "`jax.experimental.multihost_utils.process_allgather`."
        )


def _key_to_json(key):
    if isinstance(key, tuple):
        return [_key_to_json(k) for k in key]
    if key is not None and type(key) not in (bool, int, float, str):
        raise ValueError(
            "the keys of a dictionary should be strings, numbers, booleans, None, or "
            f"tuples of them. Got {key!r}."
        )
    return key


def _spec_to_json(sharding):
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    names = [
        name
        for entry in spec.partitions
        for name in (entry if isinstance(entry, tuple) else (entry,))
    ]
    named = all(name is None or isinstance(name, str) for name in names)
    if not named or spec.unreduced or spec.reduced:
        raise ValueError(
            f"only the names of axes can be saved of a sharding. Got {spec}; take it "
            "back, with `with_sharding(None)`."
        )
    return list(spec.partitions)
