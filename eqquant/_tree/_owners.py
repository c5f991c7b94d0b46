import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import AbstractArrayLike, has_numbers, is_quantized
from .._product import as_integers, Axis


# An axis, or a function from the shape of a weight to its axis.
AxisOf: TypeAlias = Axis | Callable[[tuple[int, ...]], Axis]

_owners: dict[tuple[type, str], AxisOf] = {}


def register_owner(type: type, field: str, axis: AxisOf) -> None:
    """Declares a field of a class of modules to be the weight of a matrix product, so
    that [`eqquant.tree_quantize`][] quantizes it by default.

    !!! Example

        ```python
        class Dense(eqx.Module):
            kernel: Array  # (in, out)

            def __call__(self, x):
                return x @ self.kernel

        eqquant.register_owner(Dense, "kernel", axis=-2)
        ```

    **Arguments:**

    - `type`: the class of modules. Subclasses inherit the declaration.
    - `field`: the name of the field.
    - `axis`: the axis that the product contracts: -1 for `weight @ x`, -2 for
        `x @ weight`; or a function from the shape of the weight to the axis.

    **Raises:**

    A `TypeError` if `type` is not a class, or `axis` is neither integers nor a
    function. A `ValueError` if a class of modules has no such field.
    """
    if not inspect.isclass(type):
        raise TypeError(f"`type` should be a class of modules. Got {type!r}.")
    if issubclass(type, eqx.Module):
        # (Subclasses have the fields that an abstract class declares.)
        fields = [x.name for x in dataclasses.fields(type)]
        fields += sorted(getattr(type, "__abstractvars__", ()))
        if field not in fields:
            raise ValueError(
                f"`field` should be one of the fields of {type.__name__}: {fields}. "
                f"Got {field!r}."
            )
    _owners[type, field] = axis if callable(axis) else as_integers(axis)


def _all_but_first(shape):
    return tuple(range(1 - len(shape), 0))


# These layers call `lax.conv_general_dilated`, which needs dense arrays.
convolutions = (eqx.nn.Conv, eqx.nn.ConvTranspose)
reparametrisations = (eqx.nn.WeightNorm, eqx.nn.SpectralNorm)
norms = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
activations = (eqx.nn.PReLU,)
# (A `State` owns arrays like a module, but is not one.)
Owner: TypeAlias = eqx.Module | eqx.nn.State
states = (eqx.nn.State, eqx.nn.StateIndex)

register_owner(eqx.nn.Linear, "weight", -1)
register_owner(eqx.nn.GRUCell, "weight_ih", -1)
register_owner(eqx.nn.GRUCell, "weight_hh", -1)
register_owner(eqx.nn.LSTMCell, "weight_ih", -1)
register_owner(eqx.nn.LSTMCell, "weight_hh", -1)
register_owner(eqx.nn.Embedding, "weight", -1)
for _convolution in convolutions:
    register_owner(_convolution, "weight", _all_but_first)


@dataclasses.dataclass(frozen=True)
class LeafInfo:
    """Describes an array in a PyTree.

    - `path`: its path from the root, such as `"layers.0.attention.query_proj.weight"`.
    - `owner`: the innermost module that contains it. `None` outside of any module.
    - `field`: the field of the owner that is the array, or contains it.
    - `shape`, `dtype`: its shape and dtype.
    - `axis`: the axis that a matrix product contracts.
    - `known`: whether `axis` is known, because the field is registered or the array
        has no owner. Otherwise it is a guess.
    - `ancestors`: all modules that contain it, from the root to the owner.
    - `multiplied`: whether an example multiplies inputs with it. `None` if there is no
        example.
    - `others`: the names of the other primitives of an example that use it.
    - `among_arrays`: whether an example multiplies it, but only with other arrays of
        the model.
    - `looked_up`: whether an example only looks up its rows.
    """

    path: str
    owner: Owner | None
    field: str
    shape: tuple[int, ...]
    dtype: Any
    axis: Axis
    known: bool
    ancestors: tuple[Owner, ...]
    multiplied: bool | None = None
    others: tuple[str, ...] = ()
    among_arrays: bool = False
    looked_up: bool = False


def leaves_with_info(
    tree: PyTree, is_array: Callable[[Any], bool] = is_quantized
) -> Iterator[tuple[Any, LeafInfo | None]]:
    """Yields each leaf of a tree, in order, with its info if it is an array. Nodes for
    which `is_array` is true are leaves, and count as arrays."""
    return _walk(tree, (), (), "", is_array)


def _walk(node, keys, ancestors, field, is_array):
    children, _ = jtu.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node or is_array(x)
    )
    if len(children) == 1 and children[0][0] == ():
        found = is_array(node) or eqx.is_array(node)
        if is_quantized(node) and not has_numbers(node):
            found = False
        yield node, _info(node, keys, ancestors, field) if found else None
        return
    module = isinstance(node, Owner)
    if module:
        ancestors = (*ancestors, node)
    for key, child in children:
        inner = jtu.keystr(key, simple=True) if module or not ancestors else field
        yield from _walk(child, (*keys, *key), ancestors, inner, is_array)


def _info(leaf, keys, ancestors, field):
    owner = ancestors[-1] if ancestors else None
    axis = _axis(owner, field, leaf.shape)
    # Equinox stores weights as (out, in), and plain functions as (in, out).
    default = -2 if owner is None else -1
    return LeafInfo(
        path=jtu.keystr(keys, simple=True, separator="."),
        owner=owner,
        field=field,
        shape=leaf.shape,
        dtype=leaf.dtype,
        axis=default if axis is None else axis,
        known=axis is not None or owner is None,
        ancestors=ancestors,
    )


def why_held(info: LeafInfo) -> tuple[str, str] | None:
    """Returns why a part of what stands for a weight is not quantized, and how to
    change that. Returns `None` for other arrays."""
    for module in reversed(info.ancestors):
        if isinstance(module, AbstractArrayLike):
            return module._why_dense(info.owner, info.field)
    return None


def needing_dense(info: LeafInfo) -> Owner | None:
    """Returns the Equinox layer that passes a weight to functions that need dense
    arrays, if there is one."""
    for module in info.ancestors:
        if isinstance(module, reparametrisations):
            return module
    return info.owner if isinstance(info.owner, convolutions) else None


def caller_of(info: LeafInfo) -> Owner | None:
    """Returns the module that passes this weight to functions that may need dense
    arrays."""
    layer = needing_dense(info)
    if layer is not None or info.owner is None:
        return layer
    if _calls_as_registered(info.owner, info.field):
        return None
    return info.owner if callable(info.owner) else None


def readers_of(info: LeafInfo, caller: Owner | None) -> tuple[Owner, ...]:
    """Returns the modules that may read a weight: `caller`, and the modules around the
    layer, which may bypass its call. Equinox's own modules do not."""
    modules = info.ancestors if info.owner is None else info.ancestors[:-1]
    readers = [m for m in modules if callable(m) and not _calls_as_equinox(m)]
    return tuple(readers) if caller is None else (*readers, caller)


def _calls_as_registered(owner: Owner, field: str) -> bool:
    """Whether a module's `__call__` is the one of the class that its weight is
    registered for, so that the use of the weight is known."""
    cls = _registered(type(owner), field)
    return cls is not None and _call_of(type(owner)) is _call_of(cls)


def _calls_as_equinox(module: Any) -> bool:
    """Whether a module's `__call__` is Equinox's own, which only calls the layers that
    the module contains."""
    bases = type(module).__mro__
    cls = next((base for base in bases if "__call__" in vars(base)), object)
    return cls.__module__.split(".")[0] == eqx.__name__


def _call_of(cls):
    return getattr(cls, "__call__", None)


def _axis(owner, field, shape):
    cls = _registered(type(owner), field)
    if cls is None:
        return None
    axis = _owners[cls, field]
    return axis(shape) if callable(axis) else axis


def _registered(cls, field):
    return next((base for base in cls.__mro__ if (base, field) in _owners), None)
