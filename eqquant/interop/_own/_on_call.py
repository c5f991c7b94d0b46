from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from ..._tree import is_on_call, not_on_call, on_call
from .._nodes import children


def on_call_as(
    found: Mapping[tuple[Any, ...], bool], like: PyTree
) -> Callable[[Any, Any], Any]:
    """Returns a function for `rebuilt` that makes the modules of `like` run on call as
    in a file, by the paths of the modules of the file that run under `implicit`, and
    whether all their methods do. Modules that `like` does not have, or cannot call, are
    of another class, and are left unchanged."""
    # Keyed by identity. The nodes are kept alive, so that no other object gets the same
    # `id`.
    callers = {
        id(node): (node, found[path])
        for path, node in _modules(like)
        if path in found and (found[path] or callable(node))
    }

    def change(node: Any, new: Any) -> Any:
        if id(node) not in callers:
            return new
        _, every_method = callers[id(node)]
        return on_call(not_on_call(new) if is_on_call(new) else new, every_method)

    return change


def _modules(node: PyTree, path: tuple[Any, ...] = ()) -> Iterator[Any]:
    inner = children(node)
    if inner is None:
        return
    if isinstance(node, eqx.Module):
        yield path, node
    pairs = enumerate(inner) if isinstance(inner, list) else inner.items()
    for key, child in pairs:
        yield from _modules(child, (*path, key))
