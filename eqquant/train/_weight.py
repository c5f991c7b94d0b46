import abc
import operator
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float


def _dense(x: Any) -> Any:
    return x.dequantize() if isinstance(x, AbstractWeight) else x


def _arithmetic(op: Callable) -> Callable:
    def method(self, *other):
        if not all(
            eqx.is_array_like(x) or isinstance(x, AbstractWeight) for x in other
        ):
            return NotImplemented
        return op(*map(_dense, (self, *other)))

    return method


def _reflected(op: Callable) -> Callable:
    return _arithmetic(lambda self, other: op(other, self))


class AbstractWeight(eqx.Module):
    """Stands where the weight of a layer stood, and is computed from what it holds. All
    but the product is as of the array that it stands for."""

    # So that `numpy_array @ w` is left to `w`.
    __array_ufunc__ = None

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "..."]:
        """The ordinary array that this stands for."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abc.abstractmethod
    def dtype(self) -> Any: ...

    @abc.abstractmethod
    def with_sharding(self, sharding: NamedSharding) -> "AbstractWeight":
        """Places the arrays that it holds, as the array would be that it stands for."""

    @abc.abstractmethod
    def __matmul__(self, x: Any) -> Array: ...

    @abc.abstractmethod
    def __rmatmul__(self, x: Any) -> Array: ...

    @abc.abstractmethod
    def __getitem__(self, index: Any) -> Any: ...

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype=None, copy=None):
        raise TypeError(
            f"A `{type(self).__name__}` is not made an ordinary array unless you say "
            "so: use `w.dequantize()`. Products, `x @ w` and `w @ x`, need not."
        )

    __add__ = _arithmetic(operator.add)
    __radd__ = _reflected(operator.add)
    __sub__ = _arithmetic(operator.sub)
    __rsub__ = _reflected(operator.sub)
    __mul__ = _arithmetic(operator.mul)
    __rmul__ = _reflected(operator.mul)
    __truediv__ = _arithmetic(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __pow__ = _arithmetic(operator.pow)
    __neg__ = _arithmetic(operator.neg)
    __abs__ = _arithmetic(operator.abs)
