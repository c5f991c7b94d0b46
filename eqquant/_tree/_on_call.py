import functools as ft
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import is_quantized
from .._implicit import implicit


_Module = TypeVar("_Module", bound=eqx.Module)


def on_call(module: _Module) -> _Module:
    """The same module, whose `__call__` runs through [`eqquant.implicit`][], so that
    its weights may be quantized. It stays an instance of its class."""
    if is_on_call(module):
        return module
    return _with_class(module, _class_on_call(type(module)))


def is_on_call(x: Any) -> bool:
    """Whether this is a module made by `on_call`."""
    return type(x) in _classes


def not_on_call(module: eqx.Module) -> eqx.Module:
    """The module that `on_call` was given."""
    return _with_class(module, _classes[type(module)])


def rebuilt(
    tree: PyTree,
    leaves: Iterable[Any],
    change: Callable[[eqx.Module], eqx.Module],
    where: Callable[[Any], bool],
) -> PyTree:
    """Rebuilds a tree with new leaves, and applies `change` to each module that `where`
    is true for."""
    leaves = iter(leaves)

    def rebuild(node):
        children, treedef = jtu.tree_flatten(
            node, is_leaf=lambda x: x is not node or is_quantized(x)
        )
        if len(children) == 1 and children[0] is node:
            return next(leaves)
        new = jtu.tree_unflatten(treedef, map(rebuild, children))
        return change(new) if where(node) else new

    return rebuild(tree)


_classes: dict[type, type] = {}


@ft.cache
def _class_on_call(cls):
    def call(self, *args, **kwargs):
        run = lambda self, args, kwargs: cls.__call__(self, *args, **kwargs)
        return implicit(run)(self, args, kwargs)

    # By its name, `pickle` would find the original class.
    def reduce(self):
        return on_call, (not_on_call(self),)

    namespace = {
        "__call__": ft.wraps(cls.__call__)(call),
        "__reduce__": reduce,
        "__module__": cls.__module__,
    }
    new = type(cls)(cls.__name__, (cls,), namespace)
    _classes[new] = cls
    return new


def _with_class(module, cls):
    new = object.__new__(cls)
    for name, value in vars(module).items():
        object.__setattr__(new, name, value)
    return new
