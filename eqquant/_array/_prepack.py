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
    unrotated,
)
from ..kernels import gains_by_panels
from ._array import has_numbers, is_quantized, QuantizedArray
from ._once import once_per_array


_platforms = {"cpu": "cpu", "tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}


def tree_prepack(model: PyTree, platform: str | None = None) -> PyTree:
    """Repacks the codes of all quantized arrays in the layout that the kernels of a
    platform read. Nothing is rounded: the arrays stand for the same numbers, bit for
    bit.

    - For CPUs and TPUs, the contracted axis comes first, as in the results of
        [`eqquant.quantize`][].
    - For GPUs, the rows come first.
    - For TPUs and GPUs, [`eqquant.Ternary`][] takes 2 bits instead of 1.6.
    - For the CPU of this machine, if no `platform` is named: 64 rows at a time lie
        together, in panels, if the CPU has AVX512 and the native library is built.
        Products with one row of inputs, as in decoding, then read memory in order, and
        take between two thirds of the time and the same time as before. This applies to
        matrices whose number of rows is a multiple of 64, that are not split over
        devices, and whose format gains by it: most do. A matrix in panels cannot be
        split: a function that takes a part of its stored arrays, or a `shard_map` that
        splits them, raises an error. Split it first, then prepack.

    !!! Example

        ```python
        model = eqquant.tree_quantize(model, "int4")
        model = eqquant.tree_prepack(model, platform="gpu")
        ```

    **Arguments:**

    - `model`: any PyTree.
    - `platform`: `"cpu"`, `"tpu"` or `"gpu"` (`"cuda"` and `"rocm"` are synonyms). By
        default, the platform of JAX's default backend on this machine.

    **Returns:**

    `model`, with its quantized arrays in that layout. Products with other layouts are
    also right on every platform, but slower; see [`eqquant.explain`][]. Saved files do
    not depend on panels.

    **Raises:**

    A `ValueError` for an unknown platform, and if a byte would be split over devices.
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
        layout = Layout(format, row_axis=row_axis)
        # (Panels are not for arrays that are split over devices, or written into.)
        alone = x.sharding is None and not x.is_sharded and not x.writable
        here = platform is None and kind == "cpu" and row_axis == -1 and x.ndim > 1
        if here and alone and gains_by_panels(unrotated(format), x.activation):
            layout = layout.in_panels(*x.layout.shape(x.stored)[-2:])
        return relaid_once(x, layout)

    return jtu.tree_map(prepack, model, is_leaf=is_quantized)


def relaid(q: QuantizedArray, layout: Layout) -> QuantizedArray:
    """Returns the same array in another layout, whose format may pack the same codes
    differently. The `tail` of the result is computed here; the `tail` of `layout` is
    ignored."""
    leaves = jtu.tree_leaves(q.stored)
    vector = all(q.layout.ndim(a) < 2 for a in leaves)
    row_axis = q.layout.row_axis if vector else layout.row_axis
    layout = Layout(layout.format, q.layout.tail, row_axis, layout.panels)
    if layout == q.layout:
        return q
    # (A skeleton has shapes, but no numbers.)
    skeleton = any(isinstance(a, jax.ShapeDtypeStruct) for a in leaves)
    relay = lambda stored: _relaid(stored, q.layout, layout)
    stored = jax.eval_shape(relay, q.stored) if skeleton else relay(q.stored)
    layout = layout.trimmed(stored, q.layout.shape(q.stored)[-1])
    new = dataclasses.replace(q, stored=stored, layout=layout)
    placed = isinstance(q.sharding, NamedSharding)
    return new.with_sharding(q.sharding) if placed else new


@ft.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _relaid(stored, old, new):
    # Codes are unpacked and packed again only if the format changes. All other stored
    # arrays, such as scales, are the same in both formats.
    rows = old.to_rows(stored)
    if old.format != new.format:
        codes = _grid(old.format).unpack(rows["codes"], old.tail)
        rows = rows | {"codes": _grid(new.format).pack(codes)}
    return new.from_rows(rows)


def _grid(format):
    format = unrotated(format)
    format = format.base if isinstance(format, Nested) else format
    assert isinstance(format, AbstractGrid)
    return format
