import dataclasses
import functools as ft
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import wadler_lindig as wl
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float

from .._product import (
    Axis,
    by_types,
    codes_of,
    contracted_back,
    full_spec,
    logical,
    logical_sharding,
    place,
    spec_of,
    transposed,
    typed_sharding,
    with_spec,
)
from ..formats import AbstractFormat, AbstractScaled, Layout, Stored, unrotated
from ._array_like import AbstractArrayLike
from ._index import indexed
from ._matmul import left_matmul, matmul
from ._provenance import marked, warn_dequantized
from ._stored import as_mapped, check_axes, checked, first_of, side_by_side


class QuantizedArray(AbstractArrayLike):
    """Takes the place of an array, in fewer bits. Make one with [`eqquant.quantize`][].

    It is multiplied, transposed, stacked, mapped, scanned and indexed like the array
    that it stands for. Products read the packed codes and never build that array.
    Arithmetic builds it, and returns ordinary arrays.

    **Fields:**

    - `stored`: the arrays that the format wrote: codes, scales, ... by name. The only
        field with leaves.
    - `layout`: how the numbers, with the contracted axis last, lie in the stored
        arrays. It holds the `format`.
    - `axis`: the axis, or axes, that a product contracts and that blocks lie along,
        counted from the end.
    - `sharding`: the declared sharding of the last axes; see `with_sharding`. `None` if
        none was declared.
    - `activation`: the format in which products quantize the other operand. `None` for
        weight-only products.
    - `dtype`: the dtype that it dequantizes to.
    - `inner`: the sizes of all contracted axes but the first.
    - `writable`: whether [`eqquant.implicit`][] rounds to the format the numbers that a
        function writes into the array, as into a cache. If false, such a function gets
        the ordinary array.

    **Invariants:**

    - All leaves are integers, the bits of the scales included, so that gradients,
        optimizers and casts of the inexact leaves of a model do not change it.
    - The shape is derived from the shapes of the stored arrays. It is therefore right
        after `vmap`, `scan` or `tree_map` have changed them along leading axes. `axis`,
        `inner` and `sharding` are counted from the end for the same reason.
    - The declared sharding is a hint. `placement` reads the actual one off the arrays.
    - It is immutable, and no operation pads, drops or rounds anything silently.
    """

    stored: Stored
    layout: Layout = eqx.field(static=True)
    axis: Axis = eqx.field(static=True)
    sharding: NamedSharding | PartitionSpec | None = eqx.field(static=True)
    activation: AbstractFormat | None = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    inner: tuple[int, ...] = eqx.field(static=True, default=())
    writable: bool = eqx.field(static=True, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        check_axes(first_of(self.stored), self.layout, self.axis)
        *lead, k = self.layout.shape(self.stored)
        contracted = (k // max(1, math.prod(self.inner)), *self.inner)
        return logical((*lead, k), self.axis, contracted)

    @property
    def nbytes(self) -> int:
        """The number of bytes that it takes, scales included."""
        return sum(a.size * a.dtype.itemsize for a in jtu.tree_leaves(self.stored))

    @property
    def bits_per_weight(self) -> float:
        """The number of bits per element, scales included."""
        return 8 * self.nbytes / max(1, self.size)

    @property
    def format(self) -> AbstractFormat:
        """The format of the stored arrays."""
        return self.layout.format

    @property
    def block_size(self) -> int | None:
        """The number of elements that share a scale. `None` for the whole axis."""
        return self.format.block_size

    @property
    def scale(self) -> Float[Array, "*b g"]:
        """The scale of each block, with the contracted axis last. (In
        [`eqquant.Rotated`][], the scale of the rotated numbers.)"""
        format = unrotated(self.format)
        if not isinstance(format, AbstractScaled):
            raise AttributeError(f"{self.format} has no scales.")
        check_axes(first_of(self.stored), self.layout, self.axis)
        rows = self.layout.to_rows(self.stored)
        return format.scales(rows, self.layout.tail)

    @property
    def mT(self) -> "QuantizedArray":
        """The transpose of each matrix. No data moves; only `axis` changes."""
        if self.ndim < 2 or self.axis not in (-1, -2):
            raise ValueError(
                "`.mT` needs a matrix, or a stack of matrices, with `axis` -1 or -2. "
                f"Got shape {self.shape} and axis {self.axis}."
            )
        sharding = self.sharding
        if sharding is not None:
            # (A stacked vector has one entry.)
            *lead, a, b = (*[None] * self.ndim, *spec_of(sharding))[-self.ndim :]
            sharding = with_spec(sharding, PartitionSpec(*lead, b, a))
        return dataclasses.replace(self, axis=-3 - self.axis, sharding=sharding)

    def transpose(self, *axes: Any) -> "Array | QuantizedArray":
        """Permutes the axes. If only the last two are swapped then no data moves;
        otherwise this dequantizes."""
        if len(axes) == 1 and not isinstance(axes[0], int):
            (axes,) = axes
        n = self.ndim
        order = axes or tuple(reversed(range(n)))
        if self.axis in (-1, -2) and all(-n <= i < n for i in order):
            if [i % n for i in order] == [*range(n - 2), n - 1, n - 2]:
                return self.mT
        return self._dense_for("transpose").transpose(*order)

    def swapaxes(self, axis1: int, axis2: int) -> "Array | QuantizedArray":
        """Swaps two axes, as `transpose` does."""
        order = list(range(self.ndim))
        order[axis1], order[axis2] = order[axis2], order[axis1]
        return self.transpose(*order)

    def dequantize(self) -> Float[Array, "..."]:
        """The ordinary array that this stands for, with the same shape and dtype."""
        return dequantize_for(self, "")

    @property
    def _held(self) -> "QuantizedArray":
        return self

    def _dense_for(self, reason: str) -> Float[Array, "..."]:
        warn_dequantized(self, self.size * self.dtype.itemsize, f"`{reason}`")
        return dequantize_for(self, reason)

    def astype(self, dtype: Any) -> "QuantizedArray":
        """Returns the same codes for an array of another floating-point dtype, which is
        also the dtype of products with integers."""
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                "`dtype` should be a floating-point dtype; for any other dtype, "
                f"`dequantize` first. Got {dtype.name}."
            )
        return dataclasses.replace(self, dtype=dtype)

    def delete(self) -> None:
        """Frees the memory of the stored arrays on their devices immediately."""
        for a in jtu.tree_leaves(self.stored):
            if isinstance(a, jax.Array):
                a.delete()

    #
    # Placement
    #

    @property
    def placement(self) -> Sharding | None:
        """The actual sharding of the array, which is read off the codes. `None` inside
        `jit` if the mesh has no explicit axes, for NumPy arrays, which are on no
        device, and if panels of rows are cut (see `Layout`)."""
        codes = codes_of(self.stored)
        if isinstance(codes, Tracer):
            return typed_sharding(self.stored, self.layout, self.axis)
        if isinstance(codes, np.ndarray):
            return None
        return logical_sharding(codes.sharding, self.layout, self.axis, codes.ndim)

    @property
    def is_sharded(self) -> bool:
        """Whether `placement` splits the array over devices."""
        codes = codes_of(self.stored)
        on_devices = isinstance(codes, jax.Array) and not isinstance(codes, Tracer)
        placement = codes.sharding if on_devices else self.placement
        return placement is not None and not placement.is_fully_replicated

    def with_sharding(
        self, sharding: NamedSharding | PartitionSpec | None
    ) -> "QuantizedArray":
        """Places the array, and declares its sharding.

        **Arguments:**

        - `sharding`: the sharding of the axes of `shape`. With a `NamedSharding`, the
            stored arrays are placed to match. A `PartitionSpec` is declared and moves
            nothing. `None` removes the declaration.

        **Returns:**

        The same array with this sharding.

        **Raises:**

        A `ValueError` if a block, or a byte, would be split over devices. A `TypeError`
        for any other kind of sharding.

        !!! Warning

            JAX's functions that place a PyTree (`jax.device_put`, the `in_shardings`
            of `jax.jit`, `eqx.filter_shard`) apply the given spec to each stored array,
            whose axes may be in another order: `q` and `q.T` share them. Results stay
            right, and `placement` shows the actual sharding. This cannot be told from
            another `with_sharding`, so it is no error; but JAX refuses to split scales
            that all rows, or a whole row, share.
        """
        if sharding is None:
            return dataclasses.replace(self, sharding=None)
        if isinstance(sharding, PartitionSpec):
            return dataclasses.replace(self, sharding=full_spec(sharding, self.ndim))
        if not isinstance(sharding, NamedSharding):
            raise TypeError(
                "`sharding` should be a `jax.sharding.NamedSharding`, a "
                f"`PartitionSpec` or None. Got {sharding!r}."
            )
        spec = full_spec(sharding.spec, self.ndim)
        sharding = NamedSharding(sharding.mesh, spec)
        q = side_by_side(self)
        stored = place(q.stored, sharding, q.layout, q.axis)
        return dataclasses.replace(q, stored=stored, sharding=sharding)

    def __matmul__(self, x: Any) -> Array:
        if isinstance(x, QuantizedArray):
            x = x._dense_for("matmul")
        if not eqx.is_array(x):
            return NotImplemented
        return left_matmul(self, jnp.asarray(x))

    def __rmatmul__(self, x: Any) -> Array:
        return matmul(jnp.asarray(x), self) if eqx.is_array(x) else NotImplemented

    def __getitem__(self, index: Any) -> "Array | QuantizedArray":
        """Indexing the rows of a matrix with `axis=-1` decodes those rows only.
        Indexing the leading axes of a stack returns a `QuantizedArray`. Any other index
        dequantizes, and returns what the ordinary array would."""
        return indexed(self, index, lambda: self._dense_for("getitem"))

    def __pdoc__(self, **kwargs):
        if not has_numbers(self):
            stored = wl.pdoc(self.stored, **kwargs)
            parts = [
                stored,
                wl.TextDoc(f"{self.format}"),
                wl.TextDoc(f"axis={self.axis}"),
            ]
            return wl.bracketed(
                begin=wl.TextDoc("QuantizedArray("),
                docs=parts,
                sep=wl.comma,
                end=wl.TextDoc(")"),
                indent=kwargs["indent"],
            )
        array = wl.array_summary(self.shape, self.dtype.name, kind=None)
        parts = [
            wl.pformat(array),
            f"{self.format}",
            f"axis={self.axis}",
            f"{self.bits_per_weight:.4g} bits/weight",
            f"{self.nbytes / 1e6:.3g} MB",
        ]
        if self.activation is not None:
            parts.insert(3, f"activation={self.activation}")
        if self.sharding is not None:
            parts.append(f"{spec_of(self.sharding)}")
        if self.writable:
            parts.append("writable")
        return wl.TextDoc(f"QuantizedArray({', '.join(parts)})")


def dequantize(q: QuantizedArray) -> Float[Array, "..."]:
    """The ordinary array that `q` stands for, with the same shape and dtype.

    **Raises:**

    A `TypeError` for anything else.
    """
    if not isinstance(q, AbstractArrayLike):
        raise TypeError(
            "`q` should be a `QuantizedArray`; for a PyTree that may contain some, "
            f"call `tree_dequantize`. Got {type(q).__name__}."
        )
    return q.dequantize()


def is_quantized(x: Any) -> bool:
    """Whether `x` is a [`eqquant.QuantizedArray`][]. Useful as `is_leaf`, and as a
    filter.

    !!! Example

        ```python
        leaves = jax.tree.leaves(model, is_leaf=eqquant.is_quantized)
        ```
    """
    return isinstance(x, QuantizedArray)


def as_dense(x: Any) -> Any:
    """Dequantizes a `QuantizedArray`, and returns anything else unchanged."""
    return x.dequantize() if isinstance(x, QuantizedArray) else x


def dequantize_for(q: QuantizedArray, reason: str) -> Float[Array, "..."]:
    """Returns `q.dequantize()`, under a name in the jaxpr that records which operation
    needs it."""
    return _decoder(reason)(as_mapped(q))


@ft.cache
def _decoder(reason):
    return marked(f"dequantize_for_{reason}" if reason else "dequantize", _dequantize)


def _dequantize(q):
    q = checked(q)

    def decode(q):
        stored, layout = _as_the_result_lies(q)
        w = layout.decode(stored).astype(q.dtype)
        return contracted_back(w, q.axis, q.inner)

    return by_types(decode, typed_sharding(q.stored, q.layout, q.axis))(q)


def _as_the_result_lies(q):
    # Transposing the codes takes a fraction of the time of transposing the numbers.
    if q.layout.panels is not None:
        layout = dataclasses.replace(q.layout.side_by_side, row_axis=-2)
        return q.layout.to_rows(q.stored), layout
    row_axis = {-1: -2, -2: -1}.get(q.axis, q.layout.row_axis)
    if q.layout.row_axis == row_axis or first_of(q.stored).ndim == 1:
        return q.stored, q.layout
    layout = dataclasses.replace(q.layout, row_axis=row_axis)
    return jtu.tree_map(transposed, q.stored), layout


def has_numbers(q: QuantizedArray) -> bool:
    """Whether the stored arrays are arrays, of JAX or NumPy, or
    `jax.ShapeDtypeStruct`s. After `eqx.filter` or inside a transformation they may also
    be `None`, booleans or anything else, and then `q` has no shape."""
    stored = jtu.tree_leaves(q.stored, is_leaf=lambda x: x is None)
    arrays = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    return all(isinstance(a, arrays) for a in stored)
