import functools as ft

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ...formats import (
    AbstractFormat,
    AbstractGrid,
    Binary,
    Int4,
    Int8,
    round_trip,
    Stored,
    Ternary,
)
from .._finite import infinite_as_nan
from .._problem import Problem
from .._table import register_kernel
from . import _call as call
from ._codes import Decoder, from_planes, grid, integers, lookup, spread, to_planes
from ._tuning import bundles, depth_of_tiles, tile, tile_of_rows


# Products with tiles of the weight that are decoded to bfloat16. A tile is decoded in
# parts, so that the vector unit decodes the next part while the matrix unit multiplies
# by the last one. Scales of whole rows are applied to the result, or to the inputs.


def _decoded(codes, scale, zero, decoder: Decoder) -> Float[Array, "s n"]:
    """Returns a part of a tile, with the contracted axis in the order of planes."""
    planes = decoder.decode(codes, zero)
    if scale is not None:
        rows = planes[0].shape[0]
        scale = spread(scale * np.float32(decoder.unit), rows)
        planes = [plane.astype(jnp.float32) * scale for plane in planes]
    return jnp.concatenate([plane.astype(jnp.bfloat16) for plane in planes])


def _parts(codes, scale, zero, bk, span, problem, decoder):
    """Yields the decoded parts of a tile, of `span` contracted numbers each."""
    block = problem.format.block_size
    size = call.bytes_of(problem, span)
    zero = zero[0][...].astype(jnp.int32) if zero else None
    for t in range(bk // span):
        mine = slice(t * span // block, (t + 1) * span // block) if block else slice(1)
        yield _decoded(
            codes[t * size : (t + 1) * size],
            None if block is None else scale[mine],
            None if zero is None else zero[mine],
            decoder,
        )


def _rounded(x, problem: Problem):
    if problem.activation is None:
        return x
    return round_trip(x.astype(jnp.float32), problem.activation)


def _matmul(x, stored: Stored, problem: Problem, decoder: Decoder):
    m, _ = x.shape
    size = tile(problem, decoder.planes, depth_of_tiles)
    bn, bk, span = size
    bm = tile_of_rows(m, 16)
    x = call.padded(_rounded(x, problem).astype(jnp.bfloat16), bm, bk)
    rows, k = x.shape
    x = to_planes(x, decoder.planes, span)
    weight = call.weight_operands(stored, problem, size)
    groups, blocks = call.blocks_in(size, problem), weight[1].array.shape[0]

    def step(i, total, x, codes, scale, *zero):
        scale = call.inside(scale[...], 0, i * groups, blocks)
        parts = _parts(codes, scale, zero, bk, span, problem, decoder)
        y = jnp.zeros_like(total)
        for t, w in enumerate(parts):
            part = x[:, t * span : (t + 1) * span]
            y = y + jnp.dot(part, w, preferred_element_type=jnp.float32)
        total[...] += y

    def finish(total, x, codes, scale, *zero):
        del x, codes, zero
        if problem.format.block_size is not None:
            return total
        return total * (infinite_as_nan(scale[...]) * np.float32(decoder.unit))

    inputs = call.Operand(x, (bm, bk), lambda i, j, step: (i, step))
    operands, shape = [inputs, *weight], (rows, problem.n)
    y = call.accumulate(step, finish, operands, k // bk, shape, (bm, bn), problem)
    return y[:m].astype(problem.dtype)


def _matmul_transposed(x, stored: Stored, problem: Problem, decoder: Decoder):
    m, _ = x.shape
    size = tile(problem, decoder.planes, depth_of_tiles)
    bn, bk, span = size
    bm = tile_of_rows(m, 16)
    x = _rounded(x, problem)
    if problem.format.block_size is None:
        scale = call.scales(stored, problem)
        x = x.astype(jnp.float32) * (scale * np.float32(decoder.unit))
    x = call.padded(x.astype(jnp.bfloat16), bm, bn)
    rows, n = x.shape
    k = -(-problem.k // bk) * bk
    along_n = (((1,), (1,)), ((), ()))

    def step(i, total, x, codes, scale, *zero):
        scale = call.inside(scale[...], 1, i * bn, problem.n)
        parts = _parts(codes, scale, zero, bk, span, problem, decoder)
        for t, w in enumerate(parts):
            y = lax.dot_general(x[...], w, along_n, preferred_element_type=jnp.float32)
            total[:, t * span : (t + 1) * span] += y

    def finish(total, *operands):
        del operands
        return total

    inputs = call.Operand(x, (bm, bn), lambda i, j, step: (i, step))
    operands = [inputs, *call.weight_operands(stored, problem, size, transposed=True)]
    y = call.accumulate(step, finish, operands, n // bn, (rows, k), (bm, bk), problem)
    y = from_planes(y[:m], decoder.planes, span)
    return y[:, : problem.k].astype(problem.dtype)


def mosaic_tiles(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Decodes tiles of the weight to bfloat16, and accumulates in float32."""
    return _matmul(x, stored, problem, integers(problem))


def mosaic_tiles_transposed(
    x: Float[Array, "m n"], stored: Stored, problem: Problem
) -> Float[Array, "m k"]:
    """Decodes tiles of the weight to bfloat16, and accumulates in float32."""
    return _matmul_transposed(x, stored, problem, integers(problem))


def mosaic_lookup_tiles(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Decodes tiles of the weight to bfloat16 by looking up the point of each code in
    the rows of two registers, and accumulates in float32.

    The lookups take as long as the product of several hundred rows: so the smaller
    weight mostly saves memory, not time.
    """
    return _matmul(x, stored, problem, lookup(grid(problem)))


def mosaic_lookup_tiles_transposed(
    x: Float[Array, "m n"], stored: Stored, problem: Problem
) -> Float[Array, "m k"]:
    """Decodes tiles of the weight to bfloat16 by looking up the point of each code in
    the rows of two registers, and accumulates in float32."""
    return _matmul_transposed(x, stored, problem, lookup(grid(problem)))


# With quantized activations of any format, `x` is rounded first.
_register = ft.partial(
    register_kernel, platform="tpu", activation=(None, AbstractFormat), error=8e-3
)
_integers = ft.partial(
    _register,
    format_type=(Int4, Int8, Ternary, Binary),
    supports=call.refuse,
    seconds=bundles(1600),
)
_integers("matmul")(mosaic_tiles)
_integers("matmul_transposed")(mosaic_tiles_transposed)
_lookup = ft.partial(
    _register,
    format_type=AbstractGrid,
    supports=call.refuse_lookup,
    seconds=bundles(3000),
)
_lookup("matmul")(mosaic_lookup_tiles)
_lookup("matmul_transposed")(mosaic_lookup_tiles_transposed)
