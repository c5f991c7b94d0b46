import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._array import QuantizedArray
from ..._product import as_tuple
from .._checkpoint import Entry
from .._header import damaged, from_header
from .._skeleton import Skeleton, to_skeleton
from .._tensors import from_tensor
from ._base import Source


def find_eqquant(source: Source) -> Iterator[Entry]:
    """All arrays of what [`eqquant.save`][] wrote, by their paths."""
    skeleton = checked_skeleton(
        from_header(source.config),
        {name: (x.kind, x.shape) for name, x in source.tensors.items()},
    )
    names = {id(x): name for name, x in skeleton.arrays.items()}
    used = set()
    for name, q in skeleton.quantized.items():
        # In plain dictionaries, as a format writes them.
        parts = _map(lambda x: names[id(x)], q.stored)
        used.update(jtu.tree_leaves(parts))
        yield _quantized(name, q, parts, skeleton, source)
    for name, type in skeleton.types.items():
        if name not in used:
            x = source.tensors[name]
            read = lambda type=type, x=x: from_tensor(type, x.read())
            dtype = np.dtype(type.data.struct.dtype)
            yield Entry(name, type.data.shape, dtype, None, "dense", (x,), read)


def checked_skeleton(
    layout: dict, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> Skeleton:
    """What the metadata tells of.

    **Arguments:**

    - `tensors`: the dtype, in the words of safetensors, and the shape of each tensor.

    **Raises:**

    A `ValueError` if the tensors are others.
    """
    try:
        skeleton = to_skeleton(layout)
    except (AssertionError, AttributeError, LookupError, TypeError) as e:
        raise damaged("its metadata is damaged", repr(e)) from e
    expected = {name: type.tensor_type for name, type in skeleton.types.items()}
    for name in {**expected, **tensors}:
        if expected.get(name) != tensors.get(name):
            raise damaged(
                "its tensors are not those that its metadata tells of",
                f"{name!r} should be {expected.get(name)}, and is {tensors.get(name)}",
            )
    return skeleton


def _quantized(name, q: QuantizedArray, parts, skeleton, source):
    layout = q.layout.preferred(q.ndim - len(as_tuple(q.axis)) + 1)

    def read(part):
        return from_tensor(skeleton.types[part], source.tensors[part].read())

    def to_array():
        stored = layout.from_rows(jtu.tree_map(read, parts))
        # Not memory maps, which follow their file.
        stored = jtu.tree_map(lambda x: jnp.array(x, copy=True), stored)
        return dataclasses.replace(q, stored=stored, layout=layout)

    sources = tuple(source.tensors[part] for part in jtu.tree_leaves(parts))
    dtype = np.dtype(q.dtype)
    return Entry(
        name, q.shape, dtype, q.format, "eqquant", sources, to_array, axis=q.axis
    )


def _map(fn, node):
    if isinstance(node, dict):
        return {key: _map(fn, child) for key, child in node.items()}
    return fn(node)
