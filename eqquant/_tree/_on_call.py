import functools as ft
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import is_quantized
from .._implicit import implicit
from ._owners import leaves_with_info, needing_dense


_Module = TypeVar("_Module", bound=eqx.Module)


def on_call(module: _Module, every_method: bool = False) -> _Module:
    """Makes the `__call__` of a module run through [`eqquant.implicit`][], so that its
    weights may be quantized. With `every_method`, all of its methods run so. The result
    is an instance of the same class."""
    if is_on_call(module):
        return module
    return _with_class(module, _class_on_call(type(module), every_method))


def methods_of(cls: type) -> tuple[str, ...]:
    """Returns the names of the methods of a class of modules, without Python's own."""
    names = {
        name
        for base in cls.__mro__
        if base not in eqx.Module.__mro__
        for name in vars(base)
        if name == "__call__" or not name.startswith("__")
    }
    kinds = (staticmethod, classmethod, property)
    return tuple(
        name
        for name in sorted(names)
        if not isinstance(inspect.getattr_static(cls, name), kinds)
        and inspect.isfunction(getattr(cls, name, None))
    )


def is_on_call(x: Any) -> bool:
    """Whether this is a module made by `on_call`."""
    return type(x) in _classes


def not_on_call(module: eqx.Module) -> eqx.Module:
    """Returns the module that `on_call` was applied to."""
    return _with_class(module, _classes[type(module)][0])


def runs_every_method(module: eqx.Module) -> bool:
    """Whether every method of a module made by `on_call` runs through `implicit`."""
    return _classes[type(module)][1]


def rebuilt(
    tree: PyTree,
    leaves: Iterable[Any],
    change: Callable[[Any, Any], Any],
    is_leaf: Callable[[Any], bool] = is_quantized,
) -> PyTree:
    """Rebuilds a tree with new leaves. Each `node` is replaced by `change(node, new)`,
    where `new` is the node with its new leaves."""
    leaves = iter(leaves)

    def rebuild(node):
        children, treedef = jtu.tree_flatten(
            node, is_leaf=lambda x: x is not node or is_leaf(x)
        )
        if len(children) == 1 and children[0] is node:
            return next(leaves)
        new = jtu.tree_unflatten(treedef, map(rebuild, children))
        return change(node, new)

    return rebuild(tree)


def put_on_call(callers: dict[int, bool]) -> Callable[[Any, Any], Any]:
    """Returns the `change` for `rebuilt` that puts modules on call. `callers` maps the
    `id` of a module to whether every method runs through `implicit`, or only the
    call."""

    def change(node, new):
        return on_call(new, callers[id(node)]) if id(node) in callers else new

    return change


# Maps each class that `on_call` made to the class of the original module, and to
# whether every method runs through `implicit`.
_classes: dict[type, tuple[type, bool]] = {}


@ft.cache
def _class_on_call(cls, every_method):
    # `pickle` would look the class up by its name, and find the original one.
    def reduce(self):
        return on_call, (not_on_call(self), every_method)

    names = methods_of(cls) if every_method else ("__call__",)
    namespace = {name: _method_on_call(getattr(cls, name)) for name in names}
    namespace |= {"__reduce__": reduce, "__module__": cls.__module__}
    new = type(cls)(cls.__name__, (cls,), namespace)
    _classes[new] = cls, every_method
    return new


def _method_on_call(method):
    @ft.wraps(method)
    def call(self, *args, **kwargs):
        run = lambda self, args, kwargs: method(self, *args, **kwargs)
        return implicit(run)(self, args, kwargs)

    return call


def _with_class(module, cls):
    new = object.__new__(cls)
    for name, value in vars(module).items():
        object.__setattr__(new, name, value)
    return new


def layers_on_call(
    model: PyTree, is_weight: Callable[[Any], bool] = is_quantized
) -> PyTree:
    """Makes Equinox layers that need dense arrays, such as convolutions, run through
    [`eqquant.implicit`][] if their weights are quantized, or satisfy `is_weight`. A
    layer inside a module that runs so stays as it is."""
    callers = {}
    for leaf, info in leaves_with_info(model, is_weight):
        if not is_weight(leaf) or info is None:
            continue
        layer = needing_dense(info)
        if layer is not None and not any(map(is_on_call, info.ancestors)):
            callers[id(layer)] = False
    if not callers:
        return model
    leaves = jtu.tree_leaves(model, is_leaf=is_weight)
    return rebuilt(model, leaves, put_on_call(callers), is_weight)
