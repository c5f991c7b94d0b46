import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._product import (
    as_entry,
    as_tuple,
    by_types,
    full_spec,
    names_of,
    spec_of,
    typed_sharding,
    with_spec,
)
from ._provenance import marked
from ._stored import check_stored, side_by_side


def indexed(q: Any, index: Any, dense: Callable[[], Array]) -> Any:
    """Returns `q[index]`. Indexing leading axes of a stack leaves it packed, and
    indexing the rows of a matrix with `axis=-1` decodes those rows only, unless rows
    are stored together. Any other index goes to the ordinary array, `dense()`."""
    index = index if isinstance(index, tuple) else (index,)
    stack = min(q.ndim - 2, q.ndim + as_tuple(q.axis)[0])
    if len(index) == 0 or not all(map(_is_of_one_axis, index)):
        return dense()[index]
    if len(index) <= stack:
        picked = _pick(q, index)
        if q.sharding is None:
            return picked
        # The declared sharding counts axes from the last.
        spec = PartitionSpec(*spec_of(q.sharding)[-picked.ndim :])
        sharding = with_spec(q.sharding, spec)
        return dataclasses.replace(picked, sharding=sharding)
    if 0 < stack and all(map(_is_integer, index[:stack])):
        return q[index[:stack]][index[stack:]]
    of_rows = q.ndim == 2 and q.axis == -1 and q.format.rows_together == 1
    if of_rows and len(index) == 1:
        return _rows(q, *index)
    if of_rows and _is_integer(index[0]):
        return _rows(q, index[0])[index[1:]]
    return dense()[index]


def _pick(q, index):
    old = q.stored
    check_stored(old, q.layout, q.axis)
    *lead, n, _ = q.layout.shape(old)
    if len(index) <= len(lead):
        stored = jtu.tree_map(lambda a: a[index], old)
        return dataclasses.replace(q, stored=stored)
    q = side_by_side(q)

    # The index includes the rows, as in the first axis of the filters of a convolution.
    # Arrays that all rows share are broadcast to each row first.
    def pick(a):
        return jnp.broadcast_to(a, (*a.shape[:-2], n, a.shape[-1]))[index]

    rows, layout = jtu.tree_map(pick, q.layout.to_rows(q.stored)), q.layout
    if all(a.ndim == 1 for a in jtu.tree_leaves(rows)):
        layout = layout.preferred(1)
    return dataclasses.replace(q, stored=layout.from_rows(rows), layout=layout)


def _rows(q, index):
    by_number = _is_integer(index) or _is_integers(index)
    q = q if by_number else side_by_side(q)
    stored = q.stored
    check_stored(stored, q.layout, q.axis)

    def pick(a, index):
        if q.layout.panels is not None and a.shape[-1] != 1:
            # (Other rows are not read.)
            size, (n, _) = q.layout.panel_rows, q.layout.panels
            panels = a.reshape(n // size, a.size // n, size)
            # (Integers of any dtype, negative or out of range, mean what they do in an
            # ordinary array.)
            index = jnp.arange(n)[index]
            return panels[index // size, :, index % size]
        a = jnp.moveaxis(a, q.layout.row_axis, 0)
        return jnp.broadcast_to(a, (q.shape[0], a.shape[1]))[index]

    def rows(stored, index):
        picked = jtu.tree_map(lambda a: pick(a, index), stored)
        return _decode_rows(picked, q.layout, q.dtype)

    sharding = typed_sharding(q.stored, q.layout, q.axis)
    if sharding is None:
        return rows(stored, index)
    lead = PartitionSpec(None)
    if not isinstance(index, slice):
        index = jnp.asarray(index)
        lead = full_spec(jax.typeof(index).sharding.spec, index.ndim)
    used = [name for entry in lead for name in names_of(entry)]
    across = [name for name in names_of(sharding.spec[-1]) if name not in used]
    sharding = with_spec(sharding, PartitionSpec(*lead, as_entry(tuple(across))))
    if isinstance(index, slice):
        return by_types(lambda stored: rows(stored, index), sharding)(stored)
    return by_types(rows, sharding)(stored, index)


_decode_rows = marked(
    "decode_rows",
    lambda rows, layout, dtype: layout.format.decode(rows, layout.tail).astype(dtype),
    static_argnums=(1, 2),
)


def _is_of_one_axis(index: Any) -> bool:
    if eqx.is_array(index) and index.dtype == bool:
        return index.ndim == 1
    return _is_integers(index) or isinstance(index, slice) or _is_integer(index)


def _is_integers(index: Any) -> bool:
    return eqx.is_array(index) and jnp.issubdtype(index.dtype, jnp.integer)


def _is_integer(index: Any) -> bool:
    if isinstance(index, bool | np.bool_):
        return False
    is_number = isinstance(index, int | np.integer)
    return is_number or (_is_integers(index) and index.ndim == 0)
