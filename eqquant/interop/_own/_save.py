import itertools as it
import os
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jax.core import Tracer
from jaxtyping import PyTree

from ..._array import is_quantized, side_by_side, spec_to_json
from ..._tree import is_on_call, printable, runs_every_method
from ...formats import format_to_json
from .._nodes import (
    children,
    dotted,
    is_data,
    keyed,
    kind_of_numpy,
    Path,
    plain_key,
    python_scalar,
)
from .._tensors import type_of
from ._header import to_header
from ._write import Tensor, write


_left_out = object()


def save(path: str | os.PathLike[str], m: PyTree) -> None:
    """Writes a model, or any other PyTree, to one self-describing safetensors file,
    which [`eqquant.load`][] reads.

    !!! Example

        ```python
        model = eqquant.tree_quantize(model)
        eqquant.save("model.safetensors", model)
        ```

    **Arguments:**

    - `path`: the file. An existing file is replaced atomically; if saving fails, it is
        left unchanged. (If the process is killed, its unfinished output stays in the
        same folder, as `.eqquant-*.tmp`.)
    - `m`: the PyTree. JAX and NumPy arrays and Python scalars are saved. For a
        quantized array, the file has the stored arrays exactly as in memory, the
        format, and the declared sharding (the names of mesh axes, not the devices). An
        array in several places is written once. The file also records which modules run
        under [`eqquant.implicit`][], because of `unsupported="on_call"` or an
        `example`. Functions and other leaves that are not data are left out.

    Sharded arrays are written shard by shard and never gathered in memory. If arrays
    are sharded over several processes, all of these processes must call `save`
    together, with the same `m` and a `path` in a shared folder; each writes its own
    shards to the one file. For arrays that are local to each process, the first process
    writes its own. (For object storage, use Orbax; quantized arrays need no special
    handling there.)

    **Raises:**

    A `ValueError` if an array is traced, has a dtype unknown to JAX, or is only on
    devices of another process; if `m` differs between processes; if a field of a
    format, or a key of a dictionary, cannot be written; or if `m` has too many arrays,
    or is too deeply nested, for its description to be read again. A `RuntimeError` if
    another process could not write its part: that process reports the reason.
    """
    write(path, *described(m))


def described(
    m: PyTree, numpy: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors that [`eqquant.save`][] writes, by their names, and the
    metadata. `numpy` is whether NumPy arrays load as such, instead of as JAX arrays."""
    writer = _Writer(numpy)
    try:
        writer.reserve(m, ())
        tree = writer.node(m, ())
        tree = None if tree is _left_out else tree
    except RecursionError:
        raise ValueError("Could not save `m`: it is too deeply nested.") from None
    except ValueError as e:
        raise ValueError(f"Could not save `m`{writer.where}: {e}") from e
    header = to_header(
        {
            "tree": tree,
            "arrays": writer.arrays,
            "quantized": writer.quantized,
            "on_call": writer.on_call,
        }
    )
    return writer.tensors, header


class _Writer:
    """Collects the arrays of a tree, and their descriptions for the header."""

    def __init__(self, numpy: bool):
        self._numpy = numpy
        self.tensors: dict[str, Tensor] = {}
        self.arrays: dict[str, Any] = {}
        self.quantized: dict[str, Any] = {}
        self.on_call: list[Any] = []
        self.where = ""
        # Keyed by identity. The arrays are kept alive, so that no other object gets the
        # same `id`.
        self._written: dict[int, tuple[str, Any]] = {}
        # The first path with each text.
        self._paths: dict[str, Path] = {}

    def reserve(self, node: PyTree, path: Path) -> None:
        """Reserves the names of all leaves, so that generated names do not collide with
        them."""
        self._at(path)
        found = children(node)
        if found is None:
            self._paths.setdefault(_text(path), path)
        for key, child in keyed(found or []):
            self.reserve(child, (*path, key))

    def node(self, node: PyTree, path: Path) -> Any:
        self._at(path)
        found = children(node)
        if found is None:
            return self._leaf(node, path)
        if is_on_call(node):
            keys = [_to_json(plain_key(key)) for key in path]
            self.on_call.append([keys, runs_every_method(node)])
        nodes = [self.node(child, (*path, key)) for key, child in keyed(found)]
        self._at(path)
        if isinstance(found, list):
            # A leaf that is not written keeps its place.
            return {"list": [None if x is _left_out else x for x in nodes]}
        pairs = zip(found, nodes)
        return {"dict": [(_to_json(key), x) for key, x in pairs if x is not _left_out]}

    def _at(self, path):
        self.where = f", at `{printable(dotted(path))}`" if path else ""

    def _leaf(self, x, path):
        if is_quantized(x):
            # If it has no stored arrays, they are in another part of a partitioned
            # tree.
            if not jtu.tree_leaves(x.stored):
                return None
            return {"quantized": self._once(x, path, self.quantized, self._quantized)}
        numpy = kind_of_numpy(x) if self._numpy else None
        scalar = python_scalar(x) if numpy is None else None
        if scalar is complex:
            return {"complex": [x.real, x.imag]}
        if scalar is not None:
            return x
        if is_data(x):
            return {"array": self._once(x, path, self.arrays, self._array)}
        return None if x is None else _left_out

    def _once(self, x, path, descriptions, describe):
        if id(x) not in self._written:
            name = self._new_name(path, descriptions)
            self._written[id(x)] = name, x
            descriptions[name] = describe(x, name, path)
        return self._written[id(x)][0]

    def _new_name(self, path, taken):
        text = _text(path)
        names = it.chain([text], (f"{text}#{i}" for i in it.count(2)))
        names = (n for n in names if self._paths.get(n, path) == path)
        return next(n for n in names if n not in taken and n != "__metadata__")

    def _array(self, x, name, path):
        _check_concrete(x)
        type, numpy = type_of(x), kind_of_numpy(x) if self._numpy else None
        self.tensors[name] = Tensor(x, type)
        found: dict[str, Any] = {"dtype": type.dtype, "shape": type.shape}
        return found if numpy is None else found | {"numpy": numpy}

    def _quantized(self, q, name, path):
        # A file is for every machine, so undo prepacking.
        q = side_by_side(q)
        for x in jtu.tree_leaves(q.stored):
            _check_concrete(x)
        activation = q.activation
        return {
            "shape": q.shape,
            "dtype": q.dtype.name,
            "format": format_to_json(q.format),
            "activation": None if activation is None else format_to_json(activation),
            "axis": q.axis,
            "tail": q.layout.tail,
            "row_axis": q.layout.row_axis,
            "inner": q.inner,
            "sharding": spec_to_json(q.sharding),
            "stored": self.node(q.stored, path),
            **({"writable": True} if q.writable else {}),
        }


def _text(path):
    return dotted(path) if path else "value"


def _check_concrete(x):
    if isinstance(x, Tracer):
        raise ValueError("it is being traced. Call `save` outside of `jax.jit`.")
    if not eqx.is_array(x):
        raise ValueError(f"it should be an array, with its numbers. Got {x}.")


def _to_json(key):
    if isinstance(key, tuple):
        return [_to_json(k) for k in key]
    if key is not None and type(key) not in (bool, int, float, str):
        raise ValueError(
            "the keys of a dictionary should be strings, numbers, booleans, None, or "
            f"tuples of them. Got {key!r}."
        )
    return key
