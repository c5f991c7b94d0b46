import abc
import functools as ft
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import Array, Float

from ._once import identity


_Same = TypeVar("_Same", bound="AbstractArrayLike")


def _arithmetic(op: Callable) -> Callable:
    def method(self, *other):
        if not all(
            eqx.is_array_like(x) or isinstance(x, AbstractArrayLike) for x in other
        ):
            return NotImplemented
        return op(*(dense_for(x, op.__name__) for x in (self, *other)))

    return method


_equal, _unequal = _arithmetic(operator.eq), _arithmetic(operator.ne)


def _reflected(op: Callable) -> Callable:
    return _arithmetic(ft.wraps(op)(lambda self, other: op(other, self)))


def _of_dense(name: str) -> Callable:
    # Returns the method of this name, applied to the dense array.
    def method(self, *args, **kwargs):
        args = [dense_for(x, name) for x in args]
        return getattr(self._dense_for(name), name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"Dequantizes, and returns `{name}` of the ordinary array."
    return method


class AbstractArrayLike(eqx.Module):
    """Takes the place of a dense array of the same shape and dtype, and has its
    members. Arithmetic and methods dequantize, and return ordinary arrays. Subclasses
    define products, transposes and indexing."""

    # NumPy's operators then return `NotImplemented`, so that `numpy_array @ w` reaches
    # `__rmatmul__`.
    __array_ufunc__ = None

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this stands for."""

    @property
    @abc.abstractmethod
    def mT(self: _Same) -> _Same:
        """The transpose of each matrix."""

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "..."]:
        """The ordinary array that this stands for, with the same shape and dtype."""

    @property
    @abc.abstractmethod
    def _held(self) -> Any:
        """The original array, with the same shape, dtype and placement; or its
        skeleton, or the array-like itself."""

    @abc.abstractmethod
    def _dense_for(self, reason: str) -> Float[Array, "..."]:
        """Dequantizes implicitly, for an operation with the name `reason`."""

    @abc.abstractmethod
    def with_sharding(self: _Same, sharding: Any) -> _Same:
        """Places the stored arrays so that the array is sharded in this way."""

    @abc.abstractmethod
    def __matmul__(self, x: Any) -> Array: ...

    @abc.abstractmethod
    def __rmatmul__(self, x: Any) -> Array: ...

    @abc.abstractmethod
    def __getitem__(self, index: Any) -> Any: ...

    def _why_dense(self, owner: Any, field: str) -> tuple[str, str]:
        """Returns why the array at a field of `owner`, this or a module in it, is not
        quantized, and how to change that."""
        del owner, field
        return f"held by a {type(self).__name__}, which stands for a weight", ""

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def T(self: _Same) -> _Same:
        """The transpose of a vector or matrix."""
        if self.ndim > 2:
            raise ValueError(
                "`.T` needs a vector or a matrix. To transpose each matrix of a stack, "
                f"use `.mT`. Got shape {self.shape}."
            )
        return self if self.ndim == 1 else self.mT

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self._dense_for("bool"))

    @property
    def at(self) -> Any:
        """Dequantizes, for updates such as `.at[i].set(y)`, which return ordinary
        arrays."""
        return self._dense_for("at").at

    @property
    def itemsize(self) -> int:
        """The number of bytes of each element of the ordinary array."""
        # (`dtype` is a field of some subclasses and a property of others.)
        return self.dtype.itemsize  # pyright: ignore

    @property
    def real(self) -> Array:
        return self._dense_for("real").real

    @property
    def imag(self) -> Array:
        return self._dense_for("imag").imag

    def __array__(self, dtype=None, copy=None):
        raise TypeError(self._not_an_array())

    # JAX's own error for a value that is not an array names neither the value nor a
    # remedy. Just before raising it, JAX looks up this attribute or formats the value,
    # and both raise a better error for that caller. Other callers get an
    # `AttributeError`: JAX's operators would otherwise dequantize in `x @ q`.
    @property
    def __jax_array__(self):
        if _asked_by_jax("_arraylike"):
            raise TypeError(self._not_an_array())
        raise AttributeError("There is no `__jax_array__`.")

    def __str__(self) -> str:
        if _asked_by_jax("bind", "typeof", "asarray"):
            # (JAX would replace a `TypeError` by its own.)
            raise ValueError(self._not_an_array())
        return repr(self)

    def _not_an_array(self) -> str:
        return (
            f"A `{type(self).__name__}` of shape {self.shape}{_place(self)} was passed "
            "where an ordinary array is needed. Products (`x @ q`, `q @ x`), "
            "arithmetic, indexing and the methods of arrays work directly. Call "
            "other functions, or a module that calls some, as "
            "`eqquant.implicit(function)`, or pass them `q.dequantize()`. A module "
            "calls itself so if it is quantized with `example=`, the arguments of a "
            "call, or with `unsupported='on_call'`."
        )

    all = _of_dense("all")
    any = _of_dense("any")
    argmax = _of_dense("argmax")
    argmin = _of_dense("argmin")
    argpartition = _of_dense("argpartition")
    argsort = _of_dense("argsort")
    choose = _of_dense("choose")
    clip = _of_dense("clip")
    compress = _of_dense("compress")
    conj = _of_dense("conj")
    conjugate = _of_dense("conjugate")
    copy = _of_dense("copy")
    cumprod = _of_dense("cumprod")
    cumsum = _of_dense("cumsum")
    diagonal = _of_dense("diagonal")
    dot = _of_dense("dot")
    flatten = _of_dense("flatten")
    item = _of_dense("item")
    max = _of_dense("max")
    mean = _of_dense("mean")
    min = _of_dense("min")
    nonzero = _of_dense("nonzero")
    prod = _of_dense("prod")
    ptp = _of_dense("ptp")
    ravel = _of_dense("ravel")
    repeat = _of_dense("repeat")
    reshape = _of_dense("reshape")
    round = _of_dense("round")
    searchsorted = _of_dense("searchsorted")
    sort = _of_dense("sort")
    squeeze = _of_dense("squeeze")
    std = _of_dense("std")
    sum = _of_dense("sum")
    swapaxes = _of_dense("swapaxes")
    take = _of_dense("take")
    tolist = _of_dense("tolist")
    trace = _of_dense("trace")
    transpose = _of_dense("transpose")
    var = _of_dense("var")

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

    # Two array-likes compare as modules do in Equinox. Otherwise `==` is elementwise.
    def __eq__(self, other: object) -> Any:
        if isinstance(other, AbstractArrayLike):
            return eqx.Module.__eq__(self, other)
        return _equal(self, other)

    def __ne__(self, other: object) -> Any:
        if isinstance(other, AbstractArrayLike):
            return (self == other) ^ True
        return _unequal(self, other)

    __hash__ = eqx.Module.__hash__
    __lt__ = _arithmetic(operator.lt)
    __le__ = _arithmetic(operator.le)
    __gt__ = _arithmetic(operator.gt)
    __ge__ = _arithmetic(operator.ge)
    __divmod__ = _arithmetic(divmod)
    __rdivmod__ = _reflected(divmod)
    __round__ = _of_dense("__round__")


# Packages whose frames may lie between a method and its actual caller: Equinox wraps
# the methods of modules, and type checkers wrap functions.
_between = (__name__.split(".")[0], "equinox", "jaxtyping", "beartype")


def _asked_by_jax(*functions: str) -> bool:
    asker = sys._getframe(1)
    while asker.f_back and _module(asker).split(".")[0] in _between:
        asker = asker.f_back
    return _module(asker).startswith("jax.") and asker.f_code.co_name in functions


def _module(frame):
    return frame.f_globals.get("__name__", "")


def _place(array):
    """Returns where an array is in the innermost running module of the user that
    contains it, for an error. Inside a `jit`, such as in `jnp.dot`, it is found only by
    the shapes of its stored arrays, so there may be several such places."""
    frame, is_leaf = sys._getframe(1), lambda x: isinstance(x, AbstractArrayLike)
    while frame := frame.f_back:
        module = frame.f_locals.get("self")
        package = _module(frame).split(".")[0]
        if not isinstance(module, eqx.Module) or package in ("jax", *_between):
            continue
        leaves = jtu.tree_leaves_with_path(module, is_leaf=is_leaf)
        inside = [(keys, x) for keys, x in leaves if is_leaf(x)]
        same = [keys for keys, x in inside if identity(x) == identity(array)]
        alike = [keys for keys, x in inside if _shapes(x) == _shapes(array)]
        paths = [jtu.keystr(k, simple=True, separator=".") for k in same or alike]
        if paths:
            text = " or ".join(f"`{path}`" for path in paths[:3])
            return f", {text} of `{type(module).__name__}`,"
    return ""


def _shapes(x):
    return [(a.shape, a.dtype) for a in jtu.tree_leaves(x)]


def dense_for(x: Any, reason: str) -> Any:
    """Dequantizes `x` implicitly, for an operation with the name `reason`, if `x`
    stands for an array."""
    return x._dense_for(reason) if isinstance(x, AbstractArrayLike) else x
