import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._array import relaid
from .._checkpoint import Entry
from .._layouts import register_layout, Source
from .._tensors import from_tensor
from ._like import layout
from ._skeleton import checked_skeleton


def find_eqquant(source: Source) -> Iterator[Entry]:
    """Yields all arrays of a file of [`eqquant.save`][], by their paths."""
    skeleton = checked_skeleton(source.metadata, source.tensors)
    names = {id(x): name for name, x in skeleton.arrays.items()}
    used = set()
    for name, q in skeleton.quantized.items():
        parts = jtu.tree_map(lambda x: names[id(x)], q.stored)
        used.update(jtu.tree_leaves(parts))
        yield _quantized(name, q, parts, skeleton, source)
    for name, type in skeleton.types.items():
        if name not in used:
            x = source.tensors[name]
            read = lambda type=type, x=x: from_tensor(type, x.read())
            dtype = np.dtype(type.data.struct.dtype)
            yield Entry(name, type.data.shape, dtype, None, "dense", (x,), read)


def _quantized(name, q, parts, skeleton, source):
    wanted = layout(None, q)

    def read(part):
        return from_tensor(skeleton.types[part], source.tensors[part].read())

    def to_array():
        stored = wanted.from_rows(q.layout.to_rows(jtu.tree_map(read, parts)))
        # Copy them, because memory maps change with their file.
        stored = jtu.tree_map(lambda x: jnp.array(x, copy=True), stored)
        laid = dataclasses.replace(q.layout, row_axis=wanted.row_axis)
        return relaid(dataclasses.replace(q, stored=stored, layout=laid), wanted)

    sources = tuple(source.tensors[part] for part in jtu.tree_leaves(parts))
    dtype = np.dtype(q.dtype)
    return Entry(
        name, q.shape, dtype, wanted.format, "eqquant", sources, to_array, axis=q.axis
    )


register_layout("eqquant", find_eqquant, container="eqquant")
