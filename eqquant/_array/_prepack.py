import dataclasses
import functools as ft

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ..formats import (
    AbstractFormat,
    AbstractGrid,
    from_rows,
    Nested,
    pack,
    shape_of,
    to_rows,
    unpack,
)
from ._array import has_numbers, is_quantized, QuantizedArray
from ._once import once_per_array


_platforms = {"cpu": "cpu", "tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}


def tree_prepack(model: PyTree, platform: str | None = None) -> PyTree:
    """Lays the codes of all quantized arrays as the kernels of a platform read them.
    Nothing is rounded: the numbers that they stand for stay the same, bit for bit, and
    so does the file that [`eqquant.save`][] writes.

    - On a CPU and on a TPU, the contracted axis comes first: what
      [`eqquant.quantize`][] makes.
    - On a GPU, the rows come first.
    - On a TPU and on a GPU, [`eqquant.Ternary`][] takes 2 bits instead of 1.6.

    !!! Example

        ```python
        model = eqquant.tree_quantize(model, "int4")
        model = eqquant.tree_prepack(model, platform="gpu")
        ```

    **Arguments:**

    - `model`: any PyTree.
    - `platform`: `"cpu"`, `"tpu"` or `"gpu"` (`"cuda"` and `"rocm"` are the same). By
        default that of JAX's default backend.

    **Returns:**

    `model`, with its quantized arrays in that layout. Products of another layout are
    right on every platform, too, only not as fast: [`eqquant.explain`][] tells.

    **Raises:**

    A `ValueError` for another platform, and if bytes would be split over devices.
    """
    name = jax.default_backend() if platform is None else platform
    if name not in _platforms:
        raise ValueError(
            f"`platform` should be one of {tuple(_platforms)}, or None. Got {name!r}."
        )

    kind = _platforms[name]
    relaid_once = once_per_array(relaid)

    def prepack(x):
        if not is_quantized(x) or not has_numbers(x):
            return x
        format = x.format.prepacked(kind)
        return relaid_once(x, format, -2 if kind == "gpu" else format.row_axis)

    return jtu.tree_map(prepack, model, is_leaf=is_quantized)


def relaid(q: QuantizedArray, format: AbstractFormat, row_axis: int) -> QuantizedArray:
    """The same array, in a format that packs the same codes otherwise, and with the
    rows of stored matrices on another axis."""
    if all(a.ndim < 2 for a in jtu.tree_leaves(q.stored)):
        row_axis = q.row_axis
    if (format, row_axis) == (q.format, q.row_axis):
        return q
    stored = _relaid(q.stored, q.tail, q.format, q.row_axis, format, row_axis)
    k = shape_of(q.format, q.stored, q.tail, q.row_axis)[-1]
    new = dataclasses.replace(
        q,
        stored=stored,
        format=format,
        tail=shape_of(format, stored, 0, row_axis)[-1] - k,
        row_axis=row_axis,
    )
    placed = isinstance(q.sharding, NamedSharding)
    return new.with_sharding(q.sharding) if placed else new


@ft.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5), inline=True)
def _relaid(stored, tail, old, old_axis, new, new_axis):
    stored = to_rows(stored, old_axis)
    if old != new:
        codes = unpack(stored["codes"], _radix(old), tail)
        stored = stored | {"codes": pack(codes, _radix(new))}
    return from_rows(stored, new_axis)


def _radix(format):
    format = format.base if isinstance(format, Nested) else format
    assert isinstance(format, AbstractGrid)
    return format.radix
