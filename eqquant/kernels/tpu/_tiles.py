import jax
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
from ._call import (
    accumulate,
    bytes_of,
    inside,
    Operand,
    out_dtype,
    padded,
    refuse,
    refuse_lookup,
    scales,
)
from ._codes import Decoder, from_planes, integers, lookup, spread, to_planes
from ._tuning import depth_of_tiles, tile, tile_of_rows


# Products with decoded tiles of the weight, in bfloat16: while the matrix unit works
# on one part of a tile, the next is decoded. A scale of a whole row is no part of it,
# but is applied to the result, or to the inputs.


def _decoded(codes, scale, zero, decoder: Decoder) -> Float[Array, "s n"]:
    """Part of a weight, its contracted axis in the order of planes."""
    planes = decoder.decode(codes, zero)
    if scale is not None:
        rows = planes[0].shape[0]
        scale = spread(scale * np.float32(decoder.unit), rows)
        planes = [plane.astype(jnp.float32) * scale for plane in planes]
    return jnp.concatenate([plane.astype(jnp.bfloat16) for plane in planes])


def _parts(codes, scale, zero, bk, span, problem, decoder):
    """The decoded parts of a tile, one after another."""
    block = problem.format.block_size
    size = bytes_of(problem, span)
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
    bn, bk, span = tile(problem, decoder.planes, depth_of_tiles)
    bm = tile_of_rows(m, 16)
    x = padded(_rounded(x, problem).astype(jnp.bfloat16), bm, bk)
    rows, k = x.shape
    x = to_planes(x, decoder.planes, span)
    scale = scales(stored, problem)
    block = problem.format.block_size
    groups = 1 if block is None else bk // block
    blocks = scale.shape[0]

    def step(i, total, x, codes, scale, *zero):
        scale = inside(scale[...], 0, i * groups, blocks)
        parts = _parts(codes, scale, zero, bk, span, problem, decoder)
        y = jnp.zeros_like(total)
        for t, w in enumerate(parts):
            part = x[:, t * span : (t + 1) * span]
            y = y + jnp.dot(part, w, preferred_element_type=jnp.float32)
        total[...] += y

    def finish(total, x, codes, scale, *zero):
        del x, codes, zero
        if block:
            return total
        return total * (infinite_as_nan(scale[...]) * np.float32(decoder.unit))

    by_k = lambda i, j, step: (step if block else 0, j)
    operands = [
        Operand(x, (bm, bk), lambda i, j, step: (i, step)),
        Operand(stored["codes"], (bytes_of(problem, bk), bn), lambda i, j, k: (k, j)),
        Operand(scale, (groups, bn), by_k),
    ]
    if "zero_point" in stored:
        operands.append(Operand(stored["zero_point"], (groups, bn), by_k))
    y = accumulate(
        step,
        finish,
        operands,
        (rows // bm, -(-problem.n // bn), k // bk),
        (bm, bn),
        jax.ShapeDtypeStruct((rows, problem.n), out_dtype(problem)),
        (bm, bn),
        problem,
    )
    return y[:m].astype(problem.dtype)


def _matmul_transposed(x, stored: Stored, problem: Problem, decoder: Decoder):
    m, _ = x.shape
    bn, bk, span = tile(problem, decoder.planes, depth_of_tiles)
    bm = tile_of_rows(m, 16)
    scale = scales(stored, problem)
    block = problem.format.block_size
    x = _rounded(x, problem)
    if block is None:
        x = x.astype(jnp.float32) * (scale * np.float32(decoder.unit))
    x = padded(x.astype(jnp.bfloat16), bm, bn)
    rows, n = x.shape
    groups = 1 if block is None else bk // block
    k = -(-problem.k // bk) * bk
    along_n = (((1,), (1,)), ((), ()))

    def step(i, total, x, codes, scale, *zero):
        scale = inside(scale[...], 1, i * bn, problem.n)
        parts = _parts(codes, scale, zero, bk, span, problem, decoder)
        for t, w in enumerate(parts):
            y = lax.dot_general(x[...], w, along_n, preferred_element_type=jnp.float32)
            total[:, t * span : (t + 1) * span] += y

    def finish(total, *operands):
        del operands
        return total

    by_k = lambda i, j, step: (j if block else 0, step)
    operands = [
        Operand(x, (bm, bn), lambda i, j, step: (i, step)),
        Operand(stored["codes"], (bytes_of(problem, bk), bn), lambda i, j, n: (j, n)),
        Operand(scale, (groups, bn), by_k),
    ]
    if "zero_point" in stored:
        operands.append(Operand(stored["zero_point"], (groups, bn), by_k))
    y = accumulate(
        step,
        finish,
        operands,
        (rows // bm, k // bk, n // bn),
        (bm, bk),
        jax.ShapeDtypeStruct((rows, k), out_dtype(problem)),
        (bm, bk),
        problem,
    )
    y = from_planes(y[:m], decoder.planes, span)
    return y[:, : problem.k].astype(problem.dtype)


def mosaic_tiles(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Decodes a tile of the weight at a time, to bfloat16."""
    return _matmul(x, stored, problem, integers(problem.format))


def mosaic_tiles_transposed(
    x: Float[Array, "m n"], stored: Stored, problem: Problem
) -> Float[Array, "m k"]:
    """Decodes a tile of the weight at a time, to bfloat16."""
    return _matmul_transposed(x, stored, problem, integers(problem.format))


def mosaic_lookup_tiles(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Decodes a tile of the weight at a time, to bfloat16: looks up the point of each
    code among the rows of two registers. That takes as long as the product of several
    hundred rows, so what a smaller weight saves is memory, rather than time."""
    return _matmul(x, stored, problem, lookup(problem.format))


def mosaic_lookup_tiles_transposed(
    x: Float[Array, "m n"], stored: Stored, problem: Problem
) -> Float[Array, "m k"]:
    """Decodes a tile of the weight at a time, to bfloat16, as `mosaic_lookup_tiles`."""
    return _matmul_transposed(x, stored, problem, lookup(problem.format))


def _register(product, format_type, kernel, supports):
    # Activations may also be quantized: those of any format are rounded first.
    for activation in (None, AbstractFormat):
        register_kernel(
            product, format_type, "tpu", activation, supports=supports, error=8e-3
        )(kernel)


for _format in (Int4, Int8, Ternary, Binary):
    _register("matmul", _format, mosaic_tiles, refuse)
    _register("matmul_transposed", _format, mosaic_tiles_transposed, refuse)
_register("matmul", AbstractGrid, mosaic_lookup_tiles, refuse_lookup)
_register(
    "matmul_transposed", AbstractGrid, mosaic_lookup_tiles_transposed, refuse_lookup
)
