import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt32

from ..._array import AbstractArrayLike, is_quantized, QuantizedArray
from ..._product import Axis, full_spec, placed
from ...formats import from_bits, to_bits
from .._low_precision import LowPrecision
from .._weight import AbstractWeight, by_transpose
from ._matrix import Matrix, matrix_of


class LoRA(AbstractWeight):
    """A weight with a low-rank adapter: `W + scale * B A`, in which `W` is frozen and
    the thin matrices `A` and `B` train. A product multiplies by `W`, `A` and `B` in
    turn; the sum is never materialized.

    With a `magnitude` this is DoRA: each row of the sum is rescaled to this norm.

    Make these with [`eqquant.train.lora`][].

    ??? cite "Reference"

        LoRA: Low-Rank Adaptation of Large Language Models. Hu et al., 2022. Section 4.

        QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023. Section 3.

        DoRA: Weight-Decomposed Low-Rank Adaptation. Liu et al., 2024. Section 4.

    - `base`: `W`, quantized or dense, or a weight with products in fewer bits
        ([`eqquant.train.LowPrecision`][]). It gets no gradient.
    - `a`, `b`: the thin matrices, in the orientation in which the contracted axis of
        `W` is last.
    - `magnitude`: the norm of each row for DoRA, or `None`.
    - `axis`: the axis or axes of `base` that products contract. If these are not -1 or
        -2, all axes behind them are rows of the matrix, as in `(in, heads, head)`.
    """

    base: QuantizedArray | LowPrecision | Array
    a: Float[Array, "*b r k"]
    b: Float[Array, "*b n r"]
    magnitude: Float[Array, "*b n"] | None
    # The squared norms of the rows of `W`, stored as the bits of floats so that no
    # optimizer trains them.
    norm: UInt32[Array, "*b n"] | None
    axis: Axis = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    @property
    def _held(self) -> Any:
        return self.base

    @property
    def matrix(self) -> Matrix:
        """The base as a stack of matrices."""
        found = matrix_of(self.shape, self.axis)
        assert found is not None
        return found

    @property
    def mT(self) -> "LoRA | Array":
        """The transpose of each matrix."""
        if not isinstance(self.axis, int) or self.axis < -2:
            return self.dequantize().mT
        return dataclasses.replace(self, base=self.base.mT, axis=-3 - self.axis)

    def astype(self, dtype: Any) -> "LoRA":
        """Returns the weight with another floating-point dtype."""
        cast = lambda x: None if x is None else x.astype(dtype)
        return dataclasses.replace(
            self,
            base=self.base.astype(dtype),
            a=self.a.astype(dtype),
            b=self.b.astype(dtype),
            magnitude=cast(self.magnitude),
        )

    def with_sharding(self, sharding: NamedSharding) -> "LoRA":
        """Places the base, and the thin matrices to match."""
        spec = full_spec(sharding.spec, self.ndim)
        lead, *inner = self.matrix.split(spec)
        # (Thin matrices are not split where an axis of theirs stands for several.)
        n, k = (axes[0] if len(axes) == 1 else None for axes in inner)
        if sharding.mesh.explicit_axes:
            # On Explicit meshes, JAX refuses products whose contracted axes are both
            # split.
            k = None

        def place(a, *entries):
            spec = PartitionSpec(*lead, *entries)
            return None if a is None else placed(a, NamedSharding(sharding.mesh, spec))

        of_base = NamedSharding(sharding.mesh, spec)
        base = self.base
        if isinstance(base, AbstractArrayLike):
            base = base.with_sharding(of_base)
        else:
            base = placed(base, of_base)
        return dataclasses.replace(
            self,
            base=base,
            a=place(self.a, None, k),
            b=place(self.b, n, None),
            magnitude=place(self.magnitude, n),
            norm=place(self.norm, n),
        )

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the adapted weight as a dense array."""
        matrix = self.matrix
        rows = matrix.to_rows(_dense(self.frozen))
        return matrix.from_rows(self._adapted(rows, self.b, self.magnitude))

    def without_blocks(self) -> Array:
        return self.dequantize()

    def _why_dense(self, owner: Any, field: str) -> tuple[str, str]:
        if field == "base":
            hint = "Quantize it before `lora`"
            return "the base of an adapter, which is frozen", hint
        if field == "norm":
            return "the norms of the base of an adapter", ""
        return "of an adapter, which trains", "`train.merge_lora` adds it to its base"

    def _left_product(self, x: Array) -> Array:
        return by_transpose(self, x)

    def _right_product(self, x: Array) -> Array:
        if self.axis not in (-1, -2):
            return x @ self.dequantize()
        y = self._product(x[None] if x.ndim == 1 else x)
        return jnp.squeeze(y, -2) if x.ndim == 1 else y

    def __getitem__(self, index: Any) -> "Array | LoRA":
        """Indexing the stack axes returns a `LoRA`. Indexing the rows of a matrix with
        `axis=-1` computes those rows alone. Any other index dequantizes first."""
        index = index if isinstance(index, tuple) else (index,)
        if all(map(_is_simple, index)):
            if 0 < len(index) <= len(self.matrix.stack):
                return jtu.tree_map(lambda x: x[index], self, is_leaf=is_quantized)
            if len(index) == 1 and self.ndim == 2 and self.axis == -1:
                magnitude = None if self.magnitude is None else self.magnitude[index]
                return self._adapted(self.frozen[index], self.b[index], magnitude)
        return self.dequantize()[index]

    @property
    def frozen(self) -> QuantizedArray | LowPrecision | Array:
        """The base without gradients."""
        # (No gradient reaches a quantized array anyway.)
        return self.base if is_quantized(self.base) else lax.stop_gradient(self.base)

    def _adapted(self, w, b, magnitude):
        # Computes rows of the adapted weight, from rows of `W`, `B` and the magnitude.
        dtype = w.dtype
        b, a = b.astype(jnp.float32), self.a.astype(jnp.float32)
        w = w.astype(jnp.float32) + self.scale * (b @ a)
        if magnitude is not None:
            square = lax.stop_gradient(jnp.sum(w**2, axis=-1))
            w = w * _gain(magnitude, square)[..., None]
        return w.astype(dtype)

    def _product(self, x):
        forward = self.axis == -2
        if self.magnitude is not None and not forward:
            x = _times(x, _gain(self.magnitude, self._square()))
        y = x @ self.frozen
        x, a, b = (z.astype(y.dtype) for z in (x, self.a, self.b))
        # Einsum rather than transposes: a scan over layers would keep copies of these.
        if forward:
            thin = jnp.einsum("...mk,...rk->...mr", x, a)
            y = y + self.scale * jnp.einsum("...mr,...nr->...mn", thin, b)
        else:
            y = y + self.scale * ((x @ b) @ a)
        if self.magnitude is not None and forward:
            y = _times(y, _gain(self.magnitude, self._square()))
        return y

    def _square(self):
        # The squared row norms of `W + scale * B A`, from thin products alone.
        assert self.norm is not None
        a, b = (lax.stop_gradient(x.astype(jnp.float32)) for x in (self.a, self.b))
        w = self.frozen
        if isinstance(w, QuantizedArray) and self.axis in (-1, -2):
            w = dataclasses.replace(w, activation=None)
            w = w if self.axis == -1 else w.mT
        else:
            w = self.matrix.to_rows(_dense(w).astype(jnp.float32))
        across = w @ a.mT
        across = across + self.scale / 2 * (b @ (a @ a.mT))
        square = from_bits(self.norm, jnp.dtype(jnp.float32))
        return square + 2 * self.scale * jnp.sum(across * b, axis=-1)


@ft.partial(jax.jit, static_argnums=1)
def square_norms(
    w: QuantizedArray | LowPrecision | Array, axis: Axis
) -> UInt32[Array, "*b n"]:
    """Returns the squared norms of the rows of a base, as the bits of floats."""
    matrix = matrix_of(w.shape, axis)
    assert matrix is not None
    square = jnp.sum(matrix.to_rows(_dense(w).astype(jnp.float32)) ** 2, axis=-1)
    return to_bits(square, jnp.dtype(jnp.float32))


def _dense(w):
    return w.dequantize() if isinstance(w, AbstractArrayLike) else w


def _gain(magnitude, square):
    # The norm is treated as a constant: see Section 4.3 of the DoRA paper.
    tiny = jnp.finfo(jnp.float32).tiny
    return magnitude.astype(jnp.float32) / jnp.sqrt(jnp.maximum(square, tiny))


def _times(y, gain):
    gain = gain.astype(y.dtype)[..., None, :]
    ndim = max(y.ndim, gain.ndim)
    y, gain = (z.reshape((1,) * (ndim - z.ndim) + z.shape) for z in (y, gain))
    return y * gain


def _is_simple(index):
    if eqx.is_array(index):
        return index.dtype != bool
    return isinstance(index, slice) or type(index) is int
