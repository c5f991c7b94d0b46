import functools as ft

import jax
from jax.extend.core import Primitive


def run_compiled(primitive: Primitive) -> None:
    """Outside of `jax.jit`, lets a primitive run as a program of its own, which is
    compiled once for its parameters and types."""

    @ft.cache
    def compiled(**params):
        return jax.jit(ft.partial(primitive.bind, **params))

    @primitive.def_impl
    def impl(*operands, **params):
        with jax.disable_jit(False):  # or this would call itself
            return compiled(**params)(*operands)
