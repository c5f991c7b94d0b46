import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._array import AbstractArrayLike, dense_for


class AbstractWeight(AbstractArrayLike):
    """Takes the place of a weight in training, with the shape and dtype of the array
    that it holds. It dequantizes without a warning, since training needs to."""

    @abc.abstractmethod
    def _left_product(self, x: Array) -> Array:
        """Returns `self @ x`."""

    @abc.abstractmethod
    def _right_product(self, x: Array) -> Array:
        """Returns `x @ self`."""

    @abc.abstractmethod
    def without_blocks(self) -> "AbstractWeight | Array":
        """Returns an equivalent weight without blocks, so that any part of it stands
        for the same part of the array."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self._held.shape

    @property
    def dtype(self) -> np.dtype:
        return self._held.dtype

    def _dense_for(self, reason: str) -> Float[Array, "..."]:
        del reason
        return self.dequantize()

    def __matmul__(self, x: Any) -> Array:
        x = dense_for(x, "matmul")
        return self._left_product(jnp.asarray(x)) if eqx.is_array(x) else NotImplemented

    def __rmatmul__(self, x: Any) -> Array:
        x = dense_for(x, "matmul")
        return (
            self._right_product(jnp.asarray(x)) if eqx.is_array(x) else NotImplemented
        )


def by_transpose(w: AbstractWeight, x: Array) -> Array:
    """Computes `w @ x` as the product of the transposes."""
    return x @ w.mT if x.ndim == 1 else (x.mT @ w.mT).mT


def is_simple(index: Any) -> bool:
    """Whether indexing a stack axis keeps the matrices, and leaves `axis` as it is."""
    return type(index) is int or isinstance(index, np.integer | slice)
