from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8 as I8, Shaped

from ...formats import (
    AbstractGrid,
    Binary,
    encode,
    from_bits,
    Int4,
    Int8,
    Stored,
    Ternary,
)
from .._digits import provided
from .._finite import infinite_as_nan
from .._problem import Problem
from .._table import register_kernel
from . import _call as call
from ._codes import Decoder, grid, integers, reinterpret, rounded_lookup, to_planes
from ._tuning import bundles, depth_of_blocks, few_rows, tile, tile_of_rows


# Products of bare codes, block by block, whose results are scaled. For few rows this is
# far less work than scaling the weight.
#
# A block is shorter than the matrix unit is deep. So several blocks are multiplied at
# once: each row of inputs is repeated for each of the blocks, with zeros in place of
# the other blocks. This takes more rows, of which there are few, but the weight passes
# through the matrix unit only once.


def _by_blocks(
    digits: Shaped[Array, "d m k"],
    unit: Float[Array, "m 1"],
    stored: Stored,
    problem: Problem,
    decoder: Decoder,
) -> Float[Array, "m n"]:
    """Returns the product of `(digits[0] + digits[1] / 254) * unit` with the weight, or
    of `digits[0] * unit` if there is one digit."""
    number, m, _ = digits.shape
    size = tile(problem, decoder.planes, depth_of_blocks)
    bn, bk, span = size
    bm = _tile_m(m, number, digits.dtype)
    block = problem.format.block_size
    several = 1 if block is None else span // block
    # A tile has the first digits of its rows, then their second digits.
    x = jnp.stack([call.padded(digit, bm, bk) for digit in digits])
    _, rows, k = x.shape
    x = x.reshape(number, rows // bm, bm, k).swapaxes(0, 1).reshape(number * rows, k)
    x = to_planes(x, decoder.planes, span)
    dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    weight = call.weight_operands(stored, problem, size)
    blocks = weight[1].array.shape[0]
    groups = call.blocks_in(size, problem)
    nbytes = call.bytes_of(problem, span)

    def step(i, total, x, unit, codes, scale, *zero):
        del unit
        scale = infinite_as_nan(call.inside(scale[...], 0, i * groups, blocks))
        zeros = zero[0][...].astype(jnp.int32) if zero else None
        y = jnp.zeros(total.shape, dtype if block is None else jnp.float32)
        # Multiply `span` contracted numbers at a time, which hold `several` blocks.
        for t in range(bk // span):
            less = None
            if zeros is not None:
                less = zeros[t * several : (t + 1) * several] if block else zeros
            w = decoder.decode(codes[t * nbytes : (t + 1) * nbytes], less)
            part = x[:, t * span : (t + 1) * span]
            part = _apart(part, decoder.planes, several)
            products = jnp.dot(part, jnp.concatenate(w), preferred_element_type=dtype)
            if block is None:
                y = y + products
                continue
            for b in range(several):
                of_block = products[b * number * bm : (b + 1) * number * bm]
                y = y + of_block.astype(jnp.float32) * scale[t * several + b][None]
        total[...] += y.astype(jnp.float32)

    def finish(total, x, unit, codes, scale, *zero):
        del x, codes, zero
        y = total[:bm]
        if number == 2:
            y = y + total[bm:] * np.float32(1 / 254)
        y = y * (unit[...] * np.float32(decoder.unit))
        return y * infinite_as_nan(scale[...]) if block is None else y

    inputs = call.Operand(x, (number * bm, bk), lambda i, j, step: (i, step))
    units = call.Operand(call.padded(unit, bm, 1), (bm, 1), lambda i, j, step: (i, 0))
    y = call.accumulate(
        step,
        finish,
        [inputs, units, *weight],
        k // bk,
        (rows, problem.n),
        (bm, bn),
        problem,
        sums=(number * bm, bn),
    )
    return y[:m].astype(problem.dtype)


def _tile_m(m: int, number: int, dtype) -> int:
    # A register holds 32 rows of bytes, or 16 of bfloat16.
    least = 32 // number if dtype == jnp.int8 else 16
    return tile_of_rows(m, least)


def _apart(x: Shaped[Array, "m k"], planes: int, several: int) -> Shaped[Array, "_ k"]:
    """Repeats the rows for each block, with zeros in place of the other blocks."""
    if several == 1:
        return x
    words = reinterpret(x, jnp.uint32)
    rows = words.shape[1] // planes
    position = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    # (Lowering `//` and `%` would query the generation of the TPU.)
    row = lax.rem(position, np.int32(rows))
    block = lax.div(row, np.int32(rows // several))
    only = [jnp.where(block == b, words, np.uint32(0)) for b in range(several)]
    return reinterpret(jnp.concatenate(only), x.dtype)


def _refuse_rows(
    problem: Problem, decoder: Decoder, number: int, dtype: Any
) -> str | None:
    block = problem.format.block_size
    span = tile(problem, decoder.planes, depth_of_blocks).span
    several = 1 if block is None else span // block
    assert problem.rows is not None
    rows = number * _tile_m(problem.rows, number, dtype) * several
    if rows > few_rows:
        return (
            f"is for at most {few_rows} rows in the matrix unit, which {problem.rows} "
            f"rows of inputs exceed with {rows}"
        )
    return None


def _supports_integers(problem: Problem) -> str | None:
    if reason := call.refuse(problem):
        return reason
    return _refuse_rows(problem, integers(problem), 2, jnp.int8)


def mosaic_integers(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Multiplies 8-bit integers: the codes by the inputs in two 8-bit digits. The
    weight is never converted to floats, and results are scaled block by block.

    Rows with a non-finite input become NaN.
    """
    digits, unit = _two_digits(x.astype(jnp.float32))
    decoder = integers(problem)
    return _by_blocks(digits, unit, stored, problem, decoder)


def mosaic_int8_activations(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Multiplies 8-bit integers: the codes by the quantized inputs. The scales of both
    are applied before the result is written."""
    assert isinstance(problem.activation, Int8)
    codes, _ = encode(x.astype(jnp.float32), problem.activation)
    unit = from_bits(codes["scale"], problem.activation.scale_dtype)
    decoder = integers(problem)
    return _by_blocks(codes["codes"][None], unit, stored, problem, decoder)


def _supports_int8_activations(problem: Problem) -> str | None:
    assert problem.activation is not None
    if problem.activation.block_size is not None:
        return f"needs activations with one scale per row, got {problem.activation}"
    reason = call.refuse(problem)
    if reason is not None or problem.format.block_size is None:
        return reason
    return _refuse_rows(problem, integers(problem), 1, jnp.int8)


_integers = (Int4, Int8, Ternary, Binary)
register_kernel(
    "matmul",
    _integers,
    "tpu",
    supports=_supports_integers,
    error=5e-3,
    provided=f"no input is 300 times the mean of its row, and {provided}",
    seconds=bundles(800),
)(mosaic_integers)
register_kernel(
    "matmul",
    _integers,
    "tpu",
    Int8,
    supports=_supports_int8_activations,
    seconds=bundles(450),
)(mosaic_int8_activations)


def _supports_lookup(problem: Problem) -> str | None:
    if reason := call.refuse_lookup(problem):
        return reason
    return _refuse_rows(problem, rounded_lookup(grid(problem)), 1, jnp.bfloat16)


@register_kernel(
    "matmul",
    AbstractGrid,
    "tpu",
    supports=_supports_lookup,
    error=8e-3,
    seconds=bundles(2200),
)
def mosaic_lookup(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Looks up the point of each code, in bfloat16, in the rows of a register, and
    scales the results block by block.

    A word of the register has two points. Nearly all of the time goes into the lookups.
    On a v6e they take as long as copying the weight in bfloat16 would, and on a v5e
    about half as long: so the smaller weight mostly saves memory, not time.
    """
    unit = jnp.ones((x.shape[0], 1), jnp.float32)
    decoder = rounded_lookup(grid(problem))
    return _by_blocks(x.astype(jnp.bfloat16)[None], unit, stored, problem, decoder)


def _two_digits(
    x: Float[Array, "m k"],
) -> tuple[I8[Array, "2 m k"], Float[Array, "m 1"]]:
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True, initial=1e-35)
    x_127 = x * (np.float32(127) / largest)
    first = jnp.round(x_127)
    second = jnp.round((x_127 - first) * np.float32(254))
    unit = largest * np.float32(1 / 127)
    # (A maximum may ignore NaNs.)
    unit = jnp.where(jnp.all(jnp.isfinite(x), axis=1, keepdims=True), unit, jnp.nan)
    return jnp.stack([first, second]).astype(jnp.int8), unit
