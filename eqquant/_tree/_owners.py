import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import has_numbers, is_quantized
from .._product import Axis


# Of a weight, by its shape.
AxisOf: TypeAlias = Axis | Callable[[tuple[int, ...]], Axis]

_owners: dict[tuple[type, str], AxisOf] = {}


def register_owner(type: type, field: str, axis: AxisOf) -> None:
    """Says that a field of a class of modules is the weight of a matrix product. Then
    [`eqquant.tree_quantize`][] quantizes it without being told to.

    !!! Example

        ```python
        class Dense(eqx.Module):
            kernel: Array  # (in, out)

            def __call__(self, x):
                return x @ self.kernel

        eqquant.register_owner(Dense, "kernel", axis=-2)
        ```

    **Arguments:**

    - `type`: the class of modules. Subclasses inherit this.
    - `field`: the name of the field.
    - `axis`: the axis that the product contracts: -1 for `weight @ x`, -2 for
        `x @ weight`. Or a function from the shape of the weight to that.
    """
    _owners[type, field] = axis


def _all_but_first(shape):
    return tuple(range(1 - len(shape), 0))


# Of which `weight` goes to `lax.conv_general_dilated`, so that it has to be an array.
convolutions = (eqx.nn.Conv, eqx.nn.ConvTranspose)
reparametrisations = (eqx.nn.WeightNorm, eqx.nn.SpectralNorm)
norms = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)

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
    """What is known of a leaf of a PyTree.

    - `path`: from the root, with dots: `"layers.0.attention.query_proj.weight"`.
    - `owner`: the module that it belongs to. `None` if it is in plain containers only.
    - `field`: the name of the owner's field that it is, or is in.
    - `shape`, `dtype`: those of the array.
    - `axis`: that a matrix product contracts, as far as is known.
    - `known`: whether it is: the owner is registered, or there is none.
    - `ancestors`: every module that it is in, from the root to the owner.
    """

    path: str
    owner: eqx.Module | None
    field: str
    shape: tuple[int, ...]
    dtype: Any
    axis: Axis
    known: bool
    ancestors: tuple[eqx.Module, ...]


def leaves_with_info(
    tree: PyTree, is_array: Callable[[Any], bool] = is_quantized
) -> Iterator[tuple[Any, LeafInfo | None]]:
    """Each leaf of a tree, in order. With its info if it is an array, or `is_array`
    says that it stands for one."""
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
    module = isinstance(node, eqx.Module)
    if module:
        ancestors = (*ancestors, node)
    for key, child in children:
        inner = jtu.keystr(key, simple=True) if module or not ancestors else field
        yield from _walk(child, (*keys, *key), ancestors, inner, is_array)


def _info(leaf, keys, ancestors, field):
    owner = ancestors[-1] if ancestors else None
    axis = _axis(owner, field, leaf.shape)
    # Equinox writes (out, in), and plain functions (in, out).
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


def calls_as_registered(owner: eqx.Module, field: str) -> bool:
    """Whether a module is called as the class is that its weight is registered for, so
    that it is known what becomes of that."""
    cls = _registered(type(owner), field)
    return cls is not None and _call_of(type(owner)) is _call_of(cls)


def calls_as_equinox(module: Any) -> bool:
    """Whether a module is called as some class of Equinox's own is: by calls of the
    layers in it."""
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
