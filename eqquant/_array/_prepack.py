import dataclasses
import functools as ft

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ..formats import (
    AbstractGrid,
    Layout,
    Nested,
    pack,
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
        row_axis = -2 if kind == "gpu" else format.row_axis
        return relaid_once(x, Layout(format, row_axis=row_axis))

    return jtu.tree_map(prepack, model, is_leaf=is_quantized)


def relaid(q: QuantizedArray, layout: Layout) -> QuantizedArray:
    """The same array in another layout, whose format may pack the same codes otherwise.
    The `tail` is found here, whichever `layout` has."""
    vector = all(a.ndim < 2 for a in jtu.tree_leaves(q.stored))
    row_axis = q.layout.row_axis if vector else layout.row_axis
    layout = Layout(layout.format, q.layout.tail, row_axis)
    if layout == q.layout:
        return q
    stored = _relaid(q.stored, q.layout, layout)
    layout = layout.trimmed(stored, q.layout.shape(q.stored)[-1])
    new = dataclasses.replace(q, stored=stored, layout=layout)
    placed = isinstance(q.sharding, NamedSharding)
    return new.with_sharding(q.sharding) if placed else new


@ft.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _relaid(stored, old, new):
    rows = old.to_rows(stored)
    if old.format != new.format:
        codes = unpack(rows["codes"], _radix(old.format), old.tail)
        rows = rows | {"codes": pack(codes, _radix(new.format))}
    return new.from_rows(rows)


def _radix(format):
    format = format.base if isinstance(format, Nested) else format
    assert isinstance(format, AbstractGrid)
    return format.radix
