import functools as ft
import operator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..formats import AbstractGrid, Int8
from ._cpu_codes import codes_of, grid, integer_step, per, radix, refuse_layout, scales
from ._cpu_tiles import refuse_small, tiled
from ._cpu_tuning import sweep_rows
from ._problem import Problem
from ._table import register_kernel


# The largest contracted size whose sum of products, of at most 127 each, stays within
# 32 bits.
_most = (2**31 - 1) // 127**2


def integer_tiles(
    x: Float[Array, "m _"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m _"]:
    """Products of 8-bit integers: of the codes, and of the inputs in two digits each,
    the second one a 254th of the first. With rounded activations, one digit."""
    codes, format = stored["codes"], grid(problem)
    forward = problem.product == "matmul"
    step = integer_step(format)
    assert step is not None
    a, b = map(np.int8, step)
    scale = scales(stored, problem)
    x = x.astype(jnp.float32)
    if not forward:
        x = x * scale
    if problem.activation is None:
        x, unit = _two_digits(x)
        parts = (1, 1 / 254)
    else:
        assert isinstance(problem.activation, Int8)
        rounded = problem.activation.encode(x)
        x, unit = rounded["codes"][None], problem.activation.scales(rounded, 0)
        parts = (1,)
        if problem.rows == 1:
            # XLA rewrites the product of one row, and widens the weight for it.
            x, parts = jnp.concatenate([x, x]), (1 / 2, 1 / 2)
    number, m, k = x.shape
    x = x.reshape(number * m, k)

    def decode(codes, part):
        if codes.dtype == jnp.int8:
            return codes
        # (What wraps around comes back, for all points have 8 bits.)
        found = codes_of(codes, radix(format), per(format))
        return found.astype(jnp.int8) * a + b

    def finish(y):
        y = y.reshape(number, m, y.shape[1]).astype(jnp.float32)
        return ft.reduce(operator.add, map(operator.mul, y, parts)) * unit

    y = tiled(x, codes, decode, problem, per(format), finish)
    return (y * scale if forward else y).astype(problem.dtype)


def _two_digits(x: Float[Array, "m k"]):
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True, initial=0)
    unit = jnp.where(
        largest == 0, 1, jnp.maximum(largest / 127, jnp.finfo(x.dtype).tiny)
    )
    first = jnp.round(x / unit)
    second = jnp.round((x / unit - first) * 254)
    # (A maximum drops NaNs.)
    unit = jnp.where(jnp.all(jnp.isfinite(x), axis=1, keepdims=True), unit, jnp.nan)
    return jnp.stack([first, second]).astype(jnp.int8), unit


def _integers(problem: Problem) -> str | None:
    if problem.format.block_size is not None:
        return f"needs one scale for each channel, got {problem.format}"
    if integer_step(problem.format) is None:
        return f"needs points that are integers, not those of {problem.format}"
    forward = problem.product == "matmul"
    fewer = (
        sweep_rows(problem.format) if forward else 2 if per(grid(problem)) > 1 else 0
    )
    if problem.rows is not None and problem.rows <= fewer:
        return f"is for more than {fewer} rows, got {problem.rows}"
    size = problem.k if forward else problem.n
    if size > _most:
        return f"adds at most {_most} products, got {size}"
    activation = problem.activation
    if activation is None:
        return refuse_small(problem) or refuse_layout(problem)
    if activation.block_size is not None:
        return f"needs activations with one scale for each row, got {activation}"
    return refuse_layout(problem)


_of_integers = ft.partial(
    register_kernel, format_type=AbstractGrid, priority=1, supports=_integers
)
_of_integers("matmul", error=1e-4)(integer_tiles)
_of_integers("matmul_transposed", error=1e-4)(integer_tiles)
_of_integers("matmul", activation=Int8, error=1e-5)(integer_tiles)
