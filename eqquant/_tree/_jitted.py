from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree


class _Opened(eqx.Module):
    """Replaces a function made by `eqx.filter_jit`, which flattens its module, so that
    the leaves have no paths."""

    _fun: PyTree
    donate: str = eqx.field(static=True)


def opened(tree: PyTree) -> PyTree:
    """Replaces functions made by `eqx.filter_jit` by nodes that contain the modules
    they were made from."""
    return _replaced(tree, _is_jitted, lambda x: _Opened(x.__wrapped__, _donate(x)))


def closed(tree: PyTree) -> PyTree:
    """The inverse of `opened`."""
    return _replaced(
        tree, _is_opened, lambda x: eqx.filter_jit(x._fun, donate=x.donate)
    )


_Jitted: Any = type(eqx.filter_jit(lambda: None))


def _is_jitted(x: Any) -> bool:
    return isinstance(x, _Jitted)


def _is_opened(x: Any) -> bool:
    return isinstance(x, _Opened)


def _replaced(tree, where, new):
    if not any(map(where, jtu.tree_leaves(tree, is_leaf=where))):
        return tree
    return jtu.tree_map(lambda x: new(x) if where(x) else x, tree, is_leaf=where)


def _donate(jitted):
    if not jitted.donate_rest:
        return "none"
    kind = "all" if jitted.filter_warning else "warn"
    return kind if jitted.donate_first else f"{kind}-except-first"
