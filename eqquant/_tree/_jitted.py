from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree


class _Opened(eqx.Module):
    """Stands where a function was that `eqx.filter_jit` made, whose arrays are in no
    module, but in a list of its own."""

    _fun: PyTree
    donate: str = eqx.field(static=True)


def opened(tree: PyTree) -> PyTree:
    """The same tree, with the modules to be seen that `eqx.filter_jit` was given."""
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
