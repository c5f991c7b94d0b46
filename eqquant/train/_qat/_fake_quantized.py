import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Shaped

from ..._array import quantize, QuantizedArray
from ..._product import (
    Axis,
    by_types,
    checked_by_row,
    contracted_last,
    full_spec,
    placed,
    stored_spec,
)
from ...formats import AbstractFormat, Layout, Rotated
from .._points import as_rounding, largest
from .._straight_through import checked_axis, straight_through
from .._weight import AbstractWeight, is_simple
from ._learned_step_size import (
    initial_step_size,
    learned_step_size,
    settled_step_size,
)


class FakeQuantized(AbstractWeight):
    """A weight in quantization-aware training. It replaces an array in a model, holds
    the master weight, and behaves like the quantized weight in products, indexing and
    arithmetic. Gradients pass to the master weight by the straight-through estimator.

    Make these with [`eqquant.train.tree_fake_quantize`][].

    - `weight`: the master weight, which trains.
    - `step_size`: the scale of each block, which also trains. `None` if the format
        computes the scales from the weight each time.
    - `format`, `axis`, `activation`: as in [`eqquant.quantize`][].
    - `clips`: the argument `clip` of [`eqquant.straight_through`][].
    - `is_rounded`: whether `weight` is already rounded, as within
        [`eqquant.implicit`][] once its numbers have moved.
    """

    weight: Float[Array, "..."]
    step_size: Float[Array, "*b g"] | None
    format: AbstractFormat = eqx.field(static=True)
    axis: Axis = eqx.field(static=True)
    activation: AbstractFormat | None = eqx.field(static=True)
    clips: bool = eqx.field(static=True)
    is_rounded: bool = eqx.field(static=True, default=False)

    @property
    def _held(self) -> Any:
        return self.weight

    @property
    def mT(self) -> "FakeQuantized":
        """The transpose of each matrix, with the same blocks."""
        if self.ndim < 2 or self.axis not in (-1, -2):
            raise ValueError(
                "`.mT` is for matrices, and stacks of them, with `axis` -1 or -2. Got "
                f"shape {self.shape} and axis {self.axis}."
            )
        return dataclasses.replace(self, weight=self.weight.mT, axis=-3 - self.axis)

    def astype(self, dtype: Any) -> Array:
        """Returns the quantized weight as a dense array of another dtype."""
        return self.dequantize().astype(dtype)

    def with_sharding(self, sharding: NamedSharding) -> "FakeQuantized":
        """Places the master weight, and the step sizes to match. A spec that would
        split a block or a byte is an error, so that `freeze` need not move anything."""
        spec = full_spec(sharding.spec, self.ndim)
        sharding = NamedSharding(sharding.mesh, spec)
        rows = jax.eval_shape(lambda w: contracted_last(w, self.axis), self.weight)
        entries = checked_by_row(sharding, self.format, rows.shape, self.axis)
        step_size = self.step_size
        if step_size is not None:
            spec = stored_spec(step_size.shape, entries, Layout(self.format))
            step_size = placed(step_size, NamedSharding(sharding.mesh, spec))
        weight = placed(self.weight, sharding)
        return dataclasses.replace(self, weight=weight, step_size=step_size)

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the quantized weight as a dense array: the numbers that `freeze`
        packs."""
        if self.is_rounded:
            return self.weight
        if self.step_size is None:
            return straight_through(
                self.weight, self.format, axis=self.axis, clip=self.clips
            )
        return learned_step_size(
            self.weight, self.step_size, self.format, axis=self.axis
        )

    def without_blocks(self) -> "FakeQuantized | Array":
        return self.rounded(self.dequantize(), self.axis)

    def rounded(
        self, weight: Float[Array, "..."], axis: Axis
    ) -> "FakeQuantized | Array":
        """Returns the weight after rounding, with its numbers moved: an array, unless
        products with it round their inputs."""
        if self.activation is None:
            return weight
        return dataclasses.replace(
            self, weight=weight, step_size=None, axis=axis, is_rounded=True
        )

    def _why_dense(self, owner: Any, field: str) -> tuple[str, str]:
        part = "a step size, which trains"
        if field != "step_size":
            part = f"trains to be stored in {self.format}"
        return part, "`train.tree_freeze` packs it"

    def freeze(self) -> QuantizedArray:
        """Packs the weight, with the learned step sizes if there are any."""
        q = quantize(
            self.weight, self.format, axis=self.axis, activation=self.activation
        )
        if self.step_size is None:
            return q
        rows = contracted_last(self.weight, self.axis).astype(jnp.float32)
        size = settled_step_size(rows, self.step_size, self.format)
        stored = self.format.encode(rows, size)
        q = dataclasses.replace(q, stored=q.layout.from_rows(stored))
        return q if q.sharding is None else q.with_sharding(q.sharding)

    def rounded_input(
        self, x: Float[Array, "*b _"], along: bool
    ) -> Float[Array, "*b _"]:
        """Rounds the inputs of a product as the product with the packed weight would.

        **Arguments:**

        - `along`: whether the product contracts the axis along which blocks lie.
        """
        assert self.activation is not None
        if not along or not isinstance(self.format, Rotated):
            return straight_through(x, self.activation, axis=-1)
        sharding = jax.typeof(x).sharding
        turned = by_types(self.format.rotate, sharding)(x)
        rounded = straight_through(turned, self.activation, axis=-1)
        return by_types(self.format.rotate_back, sharding)(rounded).astype(x.dtype)

    def _left_product(self, x: Array) -> Array:
        x = self._round(x, -1 if x.ndim < 2 else -2, -1)
        return jnp.matmul(self.dequantize().astype(x.dtype), x)

    def _right_product(self, x: Array) -> Array:
        x = self._round(x, -1, -1 if self.ndim == 1 else -2)
        return jnp.matmul(x, self.dequantize().astype(x.dtype))

    def __getitem__(self, index: Any) -> "Array | FakeQuantized":
        """Integers and slices along the stack axes return a `FakeQuantized`. Any other
        index returns a dense array."""
        index = index if isinstance(index, tuple) else (index,)
        on_stack = 0 < len(index) <= self.ndim - 2 and self.axis in (-1, -2)
        if not (on_stack and all(map(is_simple, index))):
            return self.dequantize()[index]
        return jax.tree.map(lambda a: a[index], self)

    def _round(
        self, x: Shaped[Array, "..."], axis: int, contracted: int
    ) -> Float[Array, "..."]:
        # `axis` of `x` and `contracted` of the weight are the contracted axes.
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            x = x.astype(self.dtype)
        of_matrix = self.ndim == 1 or self.axis in (-1, -2)
        if self.activation is None or not of_matrix:
            return x
        rows = self.rounded_input(x.swapaxes(axis, -1), self.axis == contracted)
        return rows.swapaxes(axis, -1)


def fake_quantized(
    weight: Float[Array, "..."],
    format: AbstractFormat | str,
    *,
    axis: Axis | None = None,
    activation: AbstractFormat | str | None = None,
    step_sizes: bool = False,
    clip: bool = False,
) -> FakeQuantized:
    """Wraps a master weight. Raises here for a format or an axis that `quantize` would
    refuse after the training."""
    format = as_rounding(format)
    axis = checked_axis(weight, axis)
    packed = eqx.filter_eval_shape(
        quantize, weight, format, axis=axis, activation=activation
    )
    if clip:
        largest(format)
    return FakeQuantized(
        weight=weight,
        step_size=initial_step_size(weight, format, axis) if step_sizes else None,
        format=format,
        axis=axis,
        activation=packed.activation,
        clips=clip,
    )
