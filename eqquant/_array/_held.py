import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx


def held(fn: Callable[..., Any]) -> Any:
    """Wraps a function as a field of a module that transforms it. (Equinox warns of
    fields such as `jax.vmap(layer)`: these are not trees, so the arrays in them would
    not train. Here the caller has transformed the function deliberately.)"""
    if isinstance(fn, eqx.Module) or not hasattr(fn, "__wrapped__"):
        return fn
    return ft.update_wrapper(ft.partial(fn), fn)
