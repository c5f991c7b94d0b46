import abc
import functools as ft
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import equinox as eqx
from jaxtyping import Array, Float


_Same = TypeVar("_Same", bound="AbstractStandIn")


def _arithmetic(op: Callable) -> Callable:
    def method(self, *other):
        if not all(
            eqx.is_array_like(x) or isinstance(x, AbstractStandIn) for x in other
        ):
            return NotImplemented
        return op(*(dense_for(x, op.__name__) for x in (self, *other)))

    return method


def _reflected(op: Callable) -> Callable:
    return _arithmetic(ft.wraps(op)(lambda self, other: op(other, self)))


class AbstractStandIn(eqx.Module):
    """Stands where an array of some shape and dtype stood. Arithmetic makes it that
    array; what products, transposes and indices give is for a subclass to say."""

    # So that `numpy_array @ w` is left to `w`.
    __array_ufunc__ = None

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abc.abstractmethod
    def mT(self: _Same) -> _Same:
        """The transpose of each matrix."""

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "..."]:
        """The ordinary array that this stands for, of its shape and dtype."""

    @abc.abstractmethod
    def _dense_for(self, reason: str) -> Float[Array, "..."]:
        """`dequantize`, where nobody asked for it: for an operation of this name."""

    @abc.abstractmethod
    def with_sharding(self: _Same, sharding: Any) -> _Same:
        """Places the arrays that it holds, as the array would be that it stands for."""

    @abc.abstractmethod
    def __matmul__(self, x: Any) -> Array: ...

    @abc.abstractmethod
    def __rmatmul__(self, x: Any) -> Array: ...

    @abc.abstractmethod
    def __getitem__(self, index: Any) -> Any: ...

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers it stands for."""
        return math.prod(self.shape)

    @property
    def T(self: _Same) -> _Same:
        if self.ndim > 2:
            raise ValueError(
                "`.T` is of vectors and matrices. For the transpose of the matrices of "
                f"a stack, use `.mT`. Got shape {self.shape}."
            )
        return self if self.ndim == 1 else self.mT

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self._dense_for("bool"))

    def __array__(self, dtype=None, copy=None):
        raise TypeError(
            f"A `{type(self).__name__}` is not made an ordinary array unless you say "
            "so: use `q.dequantize()`. Products, `x @ q` and `q @ x`, need not."
        )

    __add__ = _arithmetic(operator.add)
    __radd__ = _reflected(operator.add)
    __sub__ = _arithmetic(operator.sub)
    __rsub__ = _reflected(operator.sub)
    __mul__ = _arithmetic(operator.mul)
    __rmul__ = _reflected(operator.mul)
    __truediv__ = _arithmetic(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = _arithmetic(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__ = _arithmetic(operator.mod)
    __rmod__ = _reflected(operator.mod)
    __pow__ = _arithmetic(operator.pow)
    __rpow__ = _reflected(operator.pow)
    __neg__ = _arithmetic(operator.neg)
    __pos__ = _arithmetic(operator.pos)
    __abs__ = _arithmetic(operator.abs)
    __lt__ = _arithmetic(operator.lt)
    __le__ = _arithmetic(operator.le)
    __gt__ = _arithmetic(operator.gt)
    __ge__ = _arithmetic(operator.ge)


def dense_for(x: Any, reason: str) -> Any:
    """The ordinary array that something stands for, where nobody asked for it."""
    return x._dense_for(reason) if isinstance(x, AbstractStandIn) else x
