import dataclasses
import functools as ft
import itertools as it
import os
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._array import is_quantized
from ._formats import format_to_json
from ._header import to_header
from ._nodes import children, dotted, is_data, is_sequence, Path, python_scalar
from ._repacked import repacked, repacked_struct
from ._tensors import ArrayType, kind_of_numpy, type_of
from ._write import Tensor, write


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
        if anything fails then it is left as it was. (If the process is killed, then
        what it had written stays beside it, as `.eqquant-*.tmp`.)
    - `m`: the PyTree. Its arrays are written, those of NumPy as such, and its Python
        scalars; of each quantized array, the stored arrays, the format and how it was
        declared to be sharded (the names of axes, not the devices). An array that is in
        several places is written once. Functions, and other leaves that are not data,
        are not written.

    Arrays that are split over devices are written part by part, and never put together
    in memory. If there are arrays on devices of several processes then all of these
    call `save` together, with the same `m` and with a `path` in a folder that they all
    see: each writes its own parts to the one file. Of what each process has for itself,
    the first one's is written. (For storage that has objects instead of files, use
    Orbax, which needs nothing special for quantized arrays.)

    **Raises:**

    A `ValueError` if an array is being traced, if JAX has no such dtype, if it is only
    on devices of one other process, or if `m` differs between processes; and if a field
    of a format, or the key of a dictionary, cannot be written. A `RuntimeError` if
    another process could not write its part: it tells the reason.
    """
    write(path, *described(m))


def described(
    m: PyTree, numpy: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that [`eqquant.save`][] writes, and the metadata. Arrays of NumPy are
    to come back as such if that is said, and else as JAX's."""
    writer = _Writer(numpy)
    try:
        tree = writer.node(m, ())
    except ValueError as e:
        raise ValueError(f"Could not save `m`{writer.where}: {e}") from e
    header = to_header(
        {"tree": tree, "arrays": writer.arrays, "quantized": writer.quantized}
    )
    return writer.tensors, header


class _Writer:
    """Collects tensors, and what there is to say of them."""

    def __init__(self, numpy: bool):
        self._numpy = numpy
        self.tensors: dict[str, Tensor] = {}
        self.arrays: dict[str, Any] = {}
        self.quantized: dict[str, Any] = {}
        self.where = ""
        # What is written already, by its identity; kept, so that no other has that.
        self._written: dict[Any, tuple[str, Any]] = {}

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
            if not jtu.tree_leaves(x.stored):
                # Of a part of a tree, where the rest is in another part.
                return None
            if id(x) not in self._written:
                name = _new_name(path, self.quantized)
                self._written[id(x)] = name, x
                self.quantized[name] = self._describe(x, path)
            return {"quantized": self._written[id(x)][0]}
        numpy = kind_of_numpy(x) if self._numpy else None
        scalar = python_scalar(x) if numpy is None else None
        if scalar is complex:
            return {"complex": [x.real, x.imag]}
        if scalar is not None:
            return x
        if is_data(x):
            _check_concrete(x)
            x = Tensor(x, type_of(x))
        if isinstance(x, Tensor):
            key = id(x.array), x.type, x.swapped, numpy
            if key not in self._written:
                name = _new_name(path, self.arrays)
                self._written[key] = name, x
                self.tensors[name] = x
                self.arrays[name] = {"dtype": x.type.dtype, "shape": x.type.shape}
                if numpy is not None:
                    self.arrays[name]["numpy"] = numpy
            return {"array": self._written[key][0]}
        # In a list, what is not written keeps its place.
        return None

    def _describe(self, q, path):
        for x in jtu.tree_leaves(q.stored):
            _check_concrete(x)
        format, activation = q.format.prepacked("cpu"), q.activation
        layout = dataclasses.replace(q.layout, format=format)
        return {
            "shape": q.shape,
            "dtype": q.dtype.name,
            "format": format_to_json(format),
            "activation": None if activation is None else format_to_json(activation),
            "axis": q.axis,
            "tail": repacked_struct(q, layout).layout.tail,
            "inner": q.inner,
            "sharding": spec_to_json(q.sharding),
            "stored": self.node(_in_file(q, layout), path),
        }


def _in_file(q, layout):
    # In rows, however they lie in memory; and packed as on CPUs.
    structs = jtu.tree_leaves(repacked_struct(q, layout).stored)
    stored, treedef = jtu.tree_flatten(q.stored)

    def instead(i):
        return jtu.tree_leaves(repacked(q, layout).stored)[i]

    tensors = []
    for i, (x, struct) in enumerate(zip(stored, structs)):
        type = ArrayType(type_of(x).dtype, struct.shape)
        if layout.row_axis == -1:
            *lead, k, n = struct.shape
            type = type._replace(shape=(*lead, n, k))
        made = None if layout == q.layout else ft.partial(instead, i)
        tensors.append(Tensor(x, type, layout.row_axis == -1, made))
    return jtu.tree_unflatten(treedef, tensors)


def _is_written(node):
    if node is None or is_quantized(node) or isinstance(node, Tensor):
        return True
    return is_data(node) or children(node) is not None


def _new_name(path, taken):
    name = dotted(path) or "value"
    names = it.chain([name], (f"{name}#{i}" for i in it.count(2)))
    return next(n for n in names if n not in taken and n != "__metadata__")


def _check_concrete(x):
    if isinstance(x, Tracer):
        raise ValueError("it is being traced. Call `save` outside of `jax.jit`.")
    if not eqx.is_array(x):
        raise ValueError(f"it should be an array, with its numbers. Got {x}.")


def _key_to_json(key):
    if isinstance(key, tuple):
        return [_key_to_json(k) for k in key]
    if key is not None and type(key) not in (bool, int, float, str):
        raise ValueError(
            "the keys of a dictionary should be strings, numbers, booleans, None, or "
            f"tuples of them. Got {key!r}."
        )
    return key


def spec_to_json(
    sharding: NamedSharding | PartitionSpec | None,
) -> list[Any] | None:
    """The names of axes, of what was declared.

    **Raises:**

    A `ValueError` if there is more to it than these.
    """
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
