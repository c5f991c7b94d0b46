import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from ..._array import quantize, QuantizedArray
from ..._product import Axis, contracted_last, full_spec, placed
from ...formats import FP8
from .._weight import AbstractWeight, by_transpose, is_simple
from ._history import History
from ._operand import format_of, Operand
from ._product import product, rounded_weight, Roundings


class LowPrecision(AbstractWeight):
    """A weight that trains in floating point, and whose products are computed in fewer
    bits. It replaces an array in a model. Other operations than products use the weight
    without rounding.

    Make these with [`eqquant.train.tree_compute`][].

    - `weight`: the weight, which trains.
    - `rounded`: the rounded weight for products, if [`eqquant.train.tree_preround`][]
        has computed it. Otherwise `None`.
    - `axis`: the axis or axes that the layer contracts. `None` if unknown.
    - `roundings`: how products are rounded.
    - `history`: the history for the scales of [`eqquant.train.Delayed`][], if any of
        the roundings are delayed. Otherwise `None`.
    """

    weight: Float[Array, "..."]
    rounded: Operand | None
    axis: Axis | None = eqx.field(static=True)
    roundings: Roundings = eqx.field(static=True)
    history: History | None = None

    @property
    def _held(self) -> Any:
        return self.weight

    @property
    def mT(self) -> "LowPrecision":
        """The transpose of each matrix."""
        axis, rounded = None, None
        if isinstance(self.axis, int) and self.axis >= -2:
            axis, rounded = -3 - self.axis, self.rounded
        return dataclasses.replace(
            self, weight=self.weight.mT, rounded=rounded, axis=axis
        )

    def astype(self, dtype: Any) -> "LowPrecision":
        """Returns the weight with another floating-point dtype."""
        return dataclasses.replace(self, weight=self.weight.astype(dtype))

    def with_sharding(self, sharding: NamedSharding) -> "LowPrecision":
        """Places the weight."""
        spec = full_spec(sharding.spec, self.ndim)
        weight = placed(self.weight, NamedSharding(sharding.mesh, spec))
        return dataclasses.replace(self, weight=weight, rounded=None)

    def dequantize(self) -> Float[Array, "..."]:
        """The weight that trains."""
        return self.weight

    def _why_dense(self, owner: Any, field: str) -> tuple[str, str]:
        format = self.roundings.forward
        if owner is self.history:
            return "the history that sets the scales of the next steps", ""
        if owner is not self:
            return f"rounded to {format} by `train.tree_preround`", ""
        reason = f"trains in {self.dtype.name}; its products are computed in {format}"
        return reason, "`train.tree_freeze` packs it"

    def freeze(self) -> QuantizedArray:
        """Packs the rounded weight. Products with it quantize their inputs to the same
        format. (Scales are computed from the current arrays, always one for each row of
        the inputs.)"""
        if self.axis is None:
            raise ValueError(
                "`axis` should be known, to pack a weight. Got `None`: construct the "
                "`LowPrecision` by `tree_compute`."
            )
        format = format_of(self.roundings.forward)
        activation = format
        if isinstance(format, FP8):
            activation = dataclasses.replace(format, scale="channel")
        return quantize(self.weight, format, axis=self.axis, activation=activation)

    def without_blocks(self) -> "LowPrecision":
        return self

    def preround(self) -> "LowPrecision":
        """Rounds the weight for all products along `axis`. (Filters of convolutions are
        not rounded.)"""
        if not isinstance(self.axis, int):
            return self
        swapped = self.axis == -2
        w = self.weight.mT if swapped else contracted_last(self.weight, self.axis)
        rounded = rounded_weight(w, self.roundings.forward, self.history)
        return dataclasses.replace(self, rounded=rounded)

    def moved(self, weight: Float[Array, "..."], axis: Axis | None) -> "LowPrecision":
        """Returns the weight with its numbers moved."""
        history = None if self.history is None else self.history.merged()
        return dataclasses.replace(
            self, weight=weight, rounded=None, axis=axis, history=history
        )

    def _left_product(self, x: Array) -> Array:
        return by_transpose(self, x)

    def _right_product(self, x: Array) -> Array:
        if x.ndim == 0 or x.shape[-1] != self.shape[-2]:
            raise ValueError(
                "A matrix product contracts the last axis of its first operand and the "
                f"last but one of its second. Got shapes {x.shape} and {self.shape}."
            )
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ValueError(
                "Low-precision products round real numbers. Got inputs of dtype "
                f"{x.dtype.name}: multiply their real and imaginary parts."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(self.dtype)
        rounded = self.rounded if self.axis == -2 else None
        return _matmul(x, self.weight.mT, rounded, self.history, self.roundings)

    def __getitem__(self, index: Any) -> "Array | LowPrecision":
        """Integers and slices along the stack axes return a `LowPrecision`. Any other
        index returns a part of the weight."""
        index = index if isinstance(index, tuple) else (index,)
        on_stack = 0 < len(index) <= self.ndim - 2
        if not (on_stack and all(map(is_simple, index))):
            return self.weight[index]
        if self.axis not in (-1, -2):
            return self.moved(self.weight[index], None)
        return jax.tree.map(lambda a: a[index], self)


def is_low_precision(x: Any) -> bool:
    """Whether this is a [`eqquant.train.LowPrecision`][]."""
    return isinstance(x, LowPrecision)


def plain(x: Any) -> Any:
    """Returns the weight of a [`eqquant.train.LowPrecision`][]; anything else
    unchanged."""
    return x.weight if is_low_precision(x) else x


def _matmul(x, w, rounded, history, roundings):
    # Computes `x @ w.mT`, whose leading axes broadcast as in `jnp.matmul`.
    stack = w.ndim - 2
    if history is not None and history.steps.ndim - 2 != stack:
        history = history.merged()
    if stack == 0:
        return product(x, w, rounded, 0, roundings, history)
    rows = x[None] if x.ndim == 1 else x
    lead = jnp.broadcast_shapes(rows.shape[:-2], w.shape[:-2])
    stacked = lambda a: jnp.broadcast_to(a, (*lead, *a.shape[-2:]))
    w, rounded, history = stacked(w), *jtu.tree_map(stacked, (rounded, history))
    y = product(stacked(rows), w, rounded, len(lead), roundings, history)
    return jnp.squeeze(y, -2) if x.ndim == 1 else y
