import functools as ft

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ...formats import AbstractFormat, AbstractGrid, Int4, NF4
from .._finite import exact_where_not_finite
from .._problem import Problem, rounded_inputs
from .._table import register_kernel
from ._codes import codes_of, grid, per, points, radix, refuse_grid, scales
from ._costs import measured
from ._tiles import refuse_copied_scales, refuse_small, tiled


def _float_tiles(x, stored, problem, dtype):
    codes, format = stored["codes"], grid(problem)
    j = codes.shape[0]
    forward = problem.product == "matmul"
    x = rounded_inputs(x, problem)
    scale, zero = scales(stored, problem), format.offsets(stored)
    one = scale.shape[0] == 1
    if dtype == jnp.bfloat16 and not one:
        # `_to_bfloat16` adds to the bits of a float, which overflows for some NaNs.
        # Replace those here, since there are fewer scales than weights.
        scale = jnp.where(jnp.isnan(scale), jnp.nan, scale)
    if one and not forward:
        x = x * scale

    def decode(codes, part):
        w, factor = points(format, codes_of(codes, radix(format), per(format)))
        w = w if factor == 1 else w * np.float32(factor)
        w = w if zero is None else w - part(_by_code(zero, format, j))
        w = w if one else w * part(_by_code(scale, format, j))
        return w if dtype == jnp.float32 else _to_bfloat16(w)

    y = tiled(x.astype(dtype), codes, decode, problem, per(format))
    return (y * scale if one and forward else y).astype(problem.dtype)


def _by_code(a, format, j):
    # Repeats values of blocks for each code of all bytes.
    k = j * per(format)
    if a.shape[0] == 1:
        return jnp.broadcast_to(a, (k, a.shape[1]))
    # (The last byte may have places for codes beyond the last block.)
    missing = -(-k // format.block_size) - a.shape[0]
    a = jnp.pad(a, ((0, missing), (0, 0)))
    return jnp.repeat(a, format.block_size, axis=0)[:k]


def _to_bfloat16(w):
    # Rounds half up in magnitude. XLA's own conversion, half to even, is slower.
    bits = lax.bitcast_convert_type(w, jnp.uint32) + np.uint32(2**15)
    bits = (bits >> np.uint32(16)).astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def float32_tiles(
    x: Float[Array, "m _"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m _"]:
    """Decodes tiles of the weight to float32, and multiplies in float32."""
    return _finite_tiles(x, stored, problem, jnp.float32)


def bfloat16_tiles(
    x: Float[Array, "m _"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m _"]:
    """Rounds the inputs and tiles of the decoded weight to bfloat16, and accumulates in
    float32."""
    return _finite_tiles(x, stored, problem, jnp.bfloat16)


def _finite_tiles(x, stored, problem, dtype):
    kernel = ft.partial(_float_tiles, dtype=dtype)
    # In these cases, an infinite scale multiplies a sum, or zeros that pad `x` to whole
    # bytes.
    late = stored["scale"].shape[0] == 1 or problem.k % per(grid(problem)) != 0
    if problem.product == "matmul" and late:
        kernel = exact_where_not_finite(kernel)
    return kernel(x, stored, problem)


def _in_float32(problem: Problem) -> str | None:
    return refuse_grid(problem) or refuse_copied_scales(problem)


def _rounded(problem: Problem) -> str | None:
    return refuse_small(problem) or refuse_grid(problem)


_register = ft.partial(
    register_kernel,
    ("matmul", "matmul_transposed"),
    activation=(None, AbstractFormat),
)
_register(AbstractGrid, supports=_in_float32, seconds=measured("float32_tiles"))(
    float32_tiles
)
_register(
    (NF4, Int4), supports=_rounded, error=8e-3, seconds=measured("bfloat16_tiles")
)(bfloat16_tiles)
