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
from jaxtyping import Array, Float, Inexact, Shaped

from .._product import (
    Axis,
    by_types,
    codes_of,
    contracted_back,
    declared_by_row,
    full_spec,
    logical,
    logical_sharding,
    place,
    qmatmul_rows,
    spec_of,
    typed_sharding,
    with_spec,
)
from ..formats import AbstractFormat, AbstractScaled, Layout, Stored
from ._array_like import AbstractStandIn
from ._index import indexed
from ._provenance import marked, say
from ._stored import check_axes, check_stored


class QuantizedArray(AbstractStandIn):
    """Stands where an array stood, in fewer bits.

    It is multiplied, transposed, stacked, mapped, scanned and indexed as that array
    was. Products read the packed codes, and the array is not built again; arithmetic
    builds it, and gives ordinary arrays. It is immutable, and no training loop changes
    it: its leaves are integers, its scales too.

    Make one with [`eqquant.quantize`][].
    """

    stored: Stored
    layout: Layout = eqx.field(static=True)
    axis: Axis = eqx.field(static=True)
    sharding: NamedSharding | PartitionSpec | None = eqx.field(static=True)
    activation: AbstractFormat | None = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    # The sizes of all contracted axes but the first.
    inner: tuple[int, ...] = eqx.field(static=True, default=())

    @property
    def shape(self) -> tuple[int, ...]:
        check_axes(_first(self.stored).ndim, self.layout, self.axis)
        *lead, k = self.layout.shape(self.stored)
        contracted = (k // max(1, math.prod(self.inner)), *self.inner)
        return logical((*lead, k), self.axis, contracted)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes, scales included."""
        return sum(a.size * a.dtype.itemsize for a in jtu.tree_leaves(self.stored))

    @property
    def bits_per_weight(self) -> float:
        """How many bits it takes for each number, scales included."""
        return 8 * self.nbytes / max(1, self.size)

    @property
    def format(self) -> AbstractFormat:
        return self.layout.format

    @property
    def block_size(self) -> int | None:
        return self.format.block_size

    @property
    def scale(self) -> Float[Array, "*b g"]:
        """The scale of each block, with the contracted axis last."""
        if not isinstance(self.format, AbstractScaled):
            raise AttributeError(f"There are no scales in {self.format}.")
        rows = self.layout.to_rows(self.stored)
        return self.format.scales(rows, self.layout.tail)

    @property
    def mT(self) -> "QuantizedArray":
        """The transpose of each matrix. Nothing moves: another axis is contracted."""
        if self.ndim < 2 or self.axis not in (-1, -2):
            raise ValueError(
                "`.mT` is of matrices, and stacks of them, with `axis` -1 or -2. Got "
                f"shape {self.shape} and axis {self.axis}."
            )
        sharding = self.sharding
        if sharding is not None:
            *lead, a, b = spec_of(sharding)
            sharding = with_spec(sharding, PartitionSpec(*lead, b, a))
        return dataclasses.replace(self, axis=-3 - self.axis, sharding=sharding)

    def transpose(self, *axes: Any) -> "Array | QuantizedArray":
        """As of an ordinary array. If only the axes of matrices change places then
        nothing moves; otherwise this dequantizes."""
        if len(axes) == 1 and not isinstance(axes[0], int):
            (axes,) = axes
        n = self.ndim
        order = axes or tuple(reversed(range(n)))
        if self.axis in (-1, -2) and all(-n <= i < n for i in order):
            if [i % n for i in order] == [*range(n - 2), n - 1, n - 2]:
                return self.mT
        return self._dense_for("transpose").transpose(*order)

    def swapaxes(self, axis1: int, axis2: int) -> "Array | QuantizedArray":
        """As `transpose`, of two axes."""
        order = list(range(self.ndim))
        order[axis1], order[axis2] = order[axis2], order[axis1]
        return self.transpose(*order)

    def dequantize(self) -> Float[Array, "..."]:
        """The ordinary array that this stands for, of its shape and dtype."""
        return dequantize_for(self, "")

    def _dense_for(self, reason: str) -> Float[Array, "..."]:
        say(self, self.size * self.dtype.itemsize, f"`{reason}`")
        return dequantize_for(self, reason)

    def astype(self, dtype: Any) -> "QuantizedArray":
        """The same codes, standing for an array of another floating-point dtype. This
        is also the dtype of products with integers."""
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                "`dtype` should be a floating-point dtype; for any other, "
                f"`dequantize` first. Got {dtype.name}."
            )
        return dataclasses.replace(self, dtype=dtype)

    def delete(self) -> None:
        """Frees the memory of the stored arrays at once."""
        for a in jtu.tree_leaves(self.stored):
            a.delete()

    #
    # Placement
    #

    @property
    def placement(self) -> Sharding | None:
        """How the array is really placed, whatever was declared: read off the codes.
        `None` inside of `jit` where the mesh has no explicit axes."""
        codes = codes_of(self.stored)
        if isinstance(codes, Tracer):
            return typed_sharding(self.stored, self.layout, self.axis)
        return logical_sharding(codes.sharding, self.layout, self.axis, codes.ndim)

    @property
    def is_sharded(self) -> bool:
        """Whether the array is really split over devices, whatever was declared."""
        placement = self.placement
        return placement is not None and not placement.is_fully_replicated

    def with_sharding(
        self, sharding: NamedSharding | PartitionSpec | None
    ) -> "QuantizedArray":
        """Places the array, and declares how.

        **Arguments:**

        - `sharding`: of the array as its shape says. With a `NamedSharding`, the stored
            arrays are placed to match. A `PartitionSpec` alone is only declared, and
            `None` takes back what was declared.

        **Raises:**

        A `ValueError` if a block, or a byte, would be split over devices.

        !!! Warning

            JAX's own functions that place a PyTree (`jax.device_put`, the
            `in_shardings` of `jax.jit`, `eqx.filter_shard`) give each stored array the
            spec that they are given, of whose axes the order is another one. Numbers
            are right wherever they are; how the array is placed after that,
            `placement` says.
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
        stored = place(self.stored, sharding, self.layout, self.axis)
        return dataclasses.replace(self, stored=stored, sharding=sharding)

    def __matmul__(self, x: Any) -> Array:
        if isinstance(x, QuantizedArray):
            x = x._dense_for("matmul")
        if not eqx.is_array(x):
            return NotImplemented
        return left_matmul(self, jnp.asarray(x))

    def __rmatmul__(self, x: Any) -> Array:
        return matmul(jnp.asarray(x), self) if eqx.is_array(x) else NotImplemented

    def __getitem__(self, index: Any) -> "Array | QuantizedArray":
        """Of a matrix with `axis=-1`, the rows, of which no others are decoded. Of a
        stack, an index of the leading axes gives a `QuantizedArray`. Anything else
        gives what the ordinary array would."""
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
        return wl.TextDoc(f"QuantizedArray({', '.join(parts)})")


def dequantize(q: QuantizedArray) -> Float[Array, "..."]:
    """The ordinary array that `q` stands for, of its shape and dtype."""
    return q.dequantize()


def as_placed(q: QuantizedArray) -> QuantizedArray:
    """Declared to be sharded as it is, where that is known."""
    placement = q.placement
    if not isinstance(placement, NamedSharding) or placement == q.sharding:
        return q
    return dataclasses.replace(q, sharding=placement)


def as_mapped(q: QuantizedArray) -> QuantizedArray:
    """The same, of which `jax.vmap` has mapped leading axes only, or will. Before its
    shape is read."""
    return _checked(q) if isinstance(_first(q.stored), Tracer) else q


def _checked(q):
    check_stored(q.stored, q.layout, q.axis)
    return q


def is_quantized(x: Any) -> bool:
    """Whether `x` is a [`eqquant.QuantizedArray`][]. For `is_leaf`, and for filters."""
    return isinstance(x, QuantizedArray)


def as_dense(x: Any) -> Any:
    """Dequantizes a `QuantizedArray`, and leaves anything else as it is."""
    return x.dequantize() if isinstance(x, QuantizedArray) else x


def matmul(
    x: Shaped[Array, "..."],
    q: QuantizedArray,
    kernel: str | None = None,
    precision: str | None = None,
) -> Inexact[Array, "..."]:
    """`x @ q`, as `jnp.matmul` would have it, in the dtype of `x`."""
    q = as_mapped(q)
    _check_contracted(x.shape, q.shape)
    return _matmul(x, as_placed(q), kernel, precision)


def left_matmul(
    q: QuantizedArray,
    x: Shaped[Array, "..."],
    kernel: str | None = None,
    precision: str | None = None,
) -> Inexact[Array, "..."]:
    """`q @ x`, as `jnp.matmul` would have it, in the dtype of `x`."""
    q = as_mapped(q)
    _check_contracted(q.shape, x.shape)
    return _left_matmul(as_placed(q), x, kernel, precision)


def _check_contracted(left, right):
    if len(left) == 0 or len(right) == 0:
        raise ValueError(
            "A matrix product needs operands with at least one axis. Got shapes "
            f"{left} and {right}."
        )
    if left[-1] != right[-2:][0]:
        raise ValueError(
            f"A matrix product cannot contract an axis of size {left[-1]} with one of "
            f"size {right[-2:][0]}. Got shapes {left} and {right}."
        )


@ft.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _matmul(x, q, kernel, precision):
    q = _checked(q)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(q.dtype)
    if q.ndim > 1 and q.axis not in (-1, -2):
        # The blocks lie along neither axis of the matrix.
        w = q._dense_for("matmul").astype(x.dtype)
        return jnp.matmul(x, w, precision=precision)
    across = q.ndim > 1 and q.axis == -1
    y = qmatmul_rows(
        x[None] if x.ndim == 1 else x,
        jtu.tree_map(lambda a: a[None], q.stored) if q.ndim == 1 else q.stored,
        product="matmul_transposed" if across else "matmul",
        layout=q.layout,
        sharding=declared_by_row(q.sharding, q.axis, q.ndim),
        activation=q.activation,
        kernel=kernel,
        precision=precision or jax.config.jax_default_matmul_precision,  # pyright: ignore
    )
    y = y[..., 0] if q.ndim == 1 else y
    return jnp.squeeze(y, -1 if q.ndim == 1 else -2) if x.ndim == 1 else y


@ft.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _left_matmul(q, x, kernel, precision):
    transposed = x if x.ndim == 1 else x.mT
    if q.ndim == 1:
        return _matmul(transposed, q, kernel, precision)
    if q.axis not in (-1, -2):
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else q.dtype
        w = q._dense_for("matmul").astype(dtype)
        return jnp.matmul(w, x.astype(dtype), precision=precision)
    y = _matmul(transposed, q.mT, kernel, precision)
    return y if x.ndim == 1 else y.mT


def dequantize_for(q: QuantizedArray, reason: str) -> Float[Array, "..."]:
    """`q.dequantize()`, with the name of what that is done for."""
    return _decoder(reason)(as_mapped(q))


@ft.cache
def _decoder(reason):
    return marked(f"dequantize_for_{reason}" if reason else "dequantize", _dequantize)


def _dequantize(q):
    q = _checked(q)

    def decode(q):
        w = q.layout.decode(q.stored).astype(q.dtype)
        return contracted_back(w, q.axis, q.inner)

    return by_types(decode, typed_sharding(q.stored, q.layout, q.axis))(q)


def has_numbers(q: QuantizedArray) -> bool:
    """Whether the stored arrays are arrays, or structs of them. In a part of a tree, as
    `eqx.filter` makes it, and between transformations they may be anything: `None`, or
    booleans. Such has no shape."""
    stored = jtu.tree_leaves(q.stored, is_leaf=lambda x: x is None)
    return all(eqx.is_array(a) or isinstance(a, jax.ShapeDtypeStruct) for a in stored)


def _first(stored: Stored) -> Any:
    a = next(iter(stored.values()))
    return _first(a) if isinstance(a, dict) else a
