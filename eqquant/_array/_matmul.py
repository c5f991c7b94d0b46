import dataclasses
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import Array, Inexact, Shaped

from .._product import declared_by_row, qmatmul_rows
from ._stored import as_mapped, checked


def matmul(
    x: Shaped[Array, "..."],
    q: Any,
    kernel: str | None = None,
    precision: str | None = None,
) -> Inexact[Array, "..."]:
    """`x @ q`, with the semantics of `jnp.matmul`, in the dtype of `x`."""
    q = as_mapped(q)
    _check_contracted(x.shape, q.shape)
    return _matmul(x, _as_placed(q), kernel, precision)


def left_matmul(
    q: Any,
    x: Shaped[Array, "..."],
    kernel: str | None = None,
    precision: str | None = None,
) -> Inexact[Array, "..."]:
    """`q @ x`, with the semantics of `jnp.matmul`, in the dtype of `x`."""
    q = as_mapped(q)
    _check_contracted(q.shape, x.shape)
    return _left_matmul(_as_placed(q), x, kernel, precision)


def _as_placed(q):
    # Declares the actual placement of the array as its sharding, if it is known.
    placement = q.placement
    if not isinstance(placement, NamedSharding) or placement == q.sharding:
        return q
    return dataclasses.replace(q, sharding=placement)


def _check_contracted(left, right):
    if len(left) == 0 or len(right) == 0:
        raise ValueError(
            "A matrix product needs operands with at least one axis. Got shapes "
            f"{left} and {right}."
        )
    if left[-1] != right[-2:][0]:
        raise ValueError(
            f"A matrix product cannot contract an axis of size {left[-1]} with one of "
            f"size {right[-2:][0]}. Got shapes {left} and {right}."
        )


@ft.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _matmul(x, q, kernel, precision):
    q = checked(q)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(q.dtype)
    if q.ndim > 1 and q.axis not in (-1, -2):
        # Blocks lie along neither axis of the matrices, so no kernel applies.
        w = q._dense_for("matmul").astype(x.dtype)
        return jnp.matmul(x, w, precision=precision)
    across = q.ndim > 1 and q.axis == -1
    y = qmatmul_rows(
        x[None] if x.ndim == 1 else x,
        jtu.tree_map(lambda a: a[None], q.stored) if q.ndim == 1 else q.stored,
        product="matmul_transposed" if across else "matmul",
        layout=q.layout,
        sharding=declared_by_row(q.sharding, q.axis, q.ndim),
        activation=q.activation,
        kernel=kernel,
        precision=precision or jax.config.jax_default_matmul_precision,  # pyright: ignore
    )
    y = y[..., 0] if q.ndim == 1 else y
    return jnp.squeeze(y, -1 if q.ndim == 1 else -2) if x.ndim == 1 else y


@ft.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _left_matmul(q, x, kernel, precision):
    transposed = x if x.ndim == 1 else x.mT
    if q.ndim == 1:
        return _matmul(transposed, q, kernel, precision)
    if q.axis not in (-1, -2):
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else q.dtype
        w = q._dense_for("matmul").astype(dtype)
        return jnp.matmul(w, x.astype(dtype), precision=precision)
    y = _matmul(transposed, q.mT, kernel, precision)
    return y if x.ndim == 1 else y.mT
