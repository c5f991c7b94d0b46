import functools as ft
import operator
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float, Integer

from ...formats import AbstractGrid, digits, FP8, per_byte as digits_of_byte
from ..cpu._codes import integer_step, point_table
from ._pallas import mosaic_gpu


# Decoding of the bytes of a weight to an operand of `wgmma`, in registers.
#
# A thread loads words of four bytes, and decodes the codes of a word to pairs of
# bfloat16, two to a register: the first codes of bytes 0 and 2, then of bytes 1 and 3,
# then the second codes of bytes 0 and 2, and so on. The layout of `wgmma` assigns these
# registers to columns other than the columns of the codes. This permutes the contracted
# axis, which changes nothing if the columns of `x` are permuted in the same way
# (`in_order_of_words`). So no code has to move to another thread.


_e4m3 = np.dtype(jnp.float8_e4m3fn)


class Points(NamedTuple):
    """How a kernel decodes the codes of a weight. `table`, `float8` and `whole` exclude
    each other; without them, codes are integers below 128.

    - `per_byte`: the number of codes in a byte, each of a whole number of bits.
    - `table`: the numbers that codes of 4 bits stand for.
    - `float8`: the dtype of codes that are 8-bit floating-point numbers.
    - `whole`: codes are integers of 8 bits, signed or unsigned. Unsigned ones are
      decoded as if 128 were zero.
    - `zero`: the code of zero, for integers below 128. `None` if each block has its own
      zero-point.
    - `excess`: the amount by which decoded points are too large. It is subtracted
      together with the zero-point, or before the minimum is added.
    """

    per_byte: int
    table: tuple[float, ...] | None = None
    float8: np.dtype | None = None
    whole: Literal["signed", "unsigned"] | None = None
    zero: int | None = None
    excess: int = 0


@ft.cache
def points_of(format: AbstractGrid) -> Points | None:
    """Returns how to decode the codes of a format, or `None` if that is impossible."""
    if format.radix not in (4, 16, 256):
        return None
    p = digits_of_byte(format.radix)
    if (step := integer_step(format, most=255)) is not None:
        return _integers(format, p, *step)
    if isinstance(format, FP8):
        return Points(p, float8=format.dtype)
    if format.radix == 16 and format.offset is None:
        return Points(p, table=tuple(point_table(format).tolist()))
    return None


@ft.cache
def of_bytes(format: AbstractGrid) -> Points | None:
    """Returns how to decode the result of `to_bytes`, or `None` if that is
    impossible."""
    if (step := integer_step(format)) is not None and format.levels <= 128:
        if (points := _integers(format, 1, *step)) is not None:
            return points
    if format.radix is None or format.offset is not None:
        return None
    table = point_table(format)
    exact = np.array_equal(table.astype(_e4m3).astype(np.float32), table)
    return Points(1, float8=_e4m3) if exact else None


def to_bytes(
    codes: Integer[Array, "n j"], format: AbstractGrid
) -> Integer[Array, "n k"]:
    """Gives each code a byte of its own: integers as they are, and other points as
    8-bit floating-point numbers."""
    codes = format.unpack(codes, 0)
    points = of_bytes(format)
    if points is None or points.float8 is None:
        return codes
    floats = format.to_points(codes).astype(points.float8)
    return lax.bitcast_convert_type(floats, jnp.uint8)


def _integers(format, p, factor, low):
    # (Zero-points are codes. If points were not codes, the sums below might be
    # inexact.)
    if factor != 1 or (format.offset == "zero_point" and low != 0):
        return None
    signed = format.code_dtype == np.int8
    if signed or format.levels == 256:
        excess = -low if signed else -low - 128
        if format.offset is None and excess != 0:
            return None
        return Points(p, whole="signed" if signed else "unsigned", excess=excess)
    if format.offset == "zero_point":
        return Points(p, excess=128)
    return Points(p, zero=-low) if 0 <= -low < 128 else None


def ptx(points: Points) -> str:
    """Returns PTX that decodes a word, the last operand, to pairs of bfloat16, the
    operands `$0`, `$1` and so on. It applies neither scales nor the offsets of
    blocks."""
    word = f"${2 * points.per_byte}"
    if points.table is not None:
        lines = _lookups(word, points.table)
    elif points.float8 is not None:
        lines = _floats(word, points.float8)
    elif points.whole is not None:
        lines = _bytes(word, points.whole)
    else:
        lines = _integers_below_128(word, points)
    return "{\n" + "\n".join(f"{line};" for line in lines) + "\n}"


# Two times 128 in bfloat16, whose 7 mantissa bits are zero and count ones: `or` with an
# integer below 128 adds that integer.
_128 = 0x43004300


def _integers_below_128(word, points):
    # Shift a code to the low bits of each half, mask it, and `or` it into 128. Then
    # subtract 128 and the code of zero. If blocks have zero-points, the caller
    # subtracts both.
    p, zero = points.per_byte, points.zero
    bits = 8 // p
    mask = 2 ** min(bits, 7) - 1
    lines = [".reg .b32 w"]
    for i in range(p):
        for odd in range(2):
            out, shift = f"${2 * i + odd}", bits * i + 8 * odd
            masked = out if zero is None else "w"
            lines += [
                f"shr.u32 w, {word}, {shift}",
                _and_or(masked, "w", mask * 0x10001, _128),
            ]
            if zero is not None:
                lines += [
                    f"mov.b32 {out}, 0x{_128 + zero * 0x10001:08x}",
                    f"sub.rn.bf16x2 {out}, w, {out}",
                ]
    return lines


def _and_or(out, word, mask, others):
    # 0xea is the truth table of `(a & b) | c`.
    others = others if isinstance(others, str) else f"0x{others:08x}"
    return f"lop3.b32 {out}, {word}, 0x{mask:08x}, {others}, 0xea"


def _bytes(word, kind):
    # A signed byte is its low seven bits, minus 128 if the sign bit is set. Both terms
    # are made with 128 added: the first as in `_integers_below_128`; the second is 128,
    # or 256 if the sign is set, since that bit is the lowest of bfloat16's exponent.
    # Unsigned integers less 128 are the same bytes with the sign bit flipped.
    lines = [".reg .b32 w, low, sign"]
    for odd in range(2):
        lines += [
            f"shr.u32 w, {word}, {8 * odd}",
            _and_or("low", "w", 0x007F007F, _128),
        ]
        if kind == "unsigned":
            lines.append("xor.b32 w, w, 0x00800080")
        lines += [
            _and_or("sign", "w", 0x00800080, _128),
            f"sub.rn.bf16x2 ${odd}, low, sign",
        ]
    return lines


def _floats(word, dtype):
    # With its exponent shifted to the place of bfloat16's exponent, a byte stands for
    # the number times a power of two, and a product scales it back exactly. Infinities
    # and NaNs would become finite. They are the bytes above the byte of the largest
    # number: adding `carry` sets the sign bit of these bytes, and of no others. Then
    # all bits of their exponent are set. Few weights, if any, take these instructions.
    info = jnp.finfo(dtype)
    largest = int(np.asarray(info.max, dtype).view(np.uint8))
    power = 127 - (1 - int(info.minexp))
    factor, carry = (power + 127) << 7, 127 - largest
    # `e4m3fn` has no infinities: these bytes are NaN, so a bit of the mantissa is set,
    # too. In other dtypes, the mantissa tells NaNs from infinities.
    exponent = 0x7FC0 if dtype == jnp.float8_e4m3fn else 0x7F80
    lines = [
        ".reg .b32 w, rest, factor, wild, few",
        ".reg .pred any",
        f"mov.b32 factor, 0x{factor * 0x10001:08x}",
        f"and.b32 wild, {word}, 0x7f7f7f7f",
        f"add.u32 wild, wild, 0x{carry * 0x01010101:08x}",
        "and.b32 wild, wild, 0x80808080",
        "setp.ne.u32 any, wild, 0",
    ]
    for odd in range(2):
        lines += [
            f"shl.b32 w, {word}, {8 - 8 * odd}",
            "and.b32 rest, w, 0x7f007f00",
            f"shr.u32 rest, rest, {info.nmant + 1}",
            _and_or("rest", "w", 0x80008000, "rest"),
            f"mul.rn.bf16x2 ${odd}, rest, factor",
            f"@any shl.b32 few, wild, {8 - 8 * odd}",
            "@any and.b32 few, few, 0x80008000",
            "@any shr.u32 few, few, 15",
            f"@any mul.lo.u32 few, few, 0x{exponent:04x}",
            f"@any or.b32 ${odd}, ${odd}, few",
        ]
    return lines


def _lookups(word, table):
    # `prmt` looks up four codes of three bits in a table of eight bytes. So the 16
    # points take two tables for their low bytes and two for their high bytes. The
    # fourth bit of each code chooses between the two (`half`), and a last `prmt`
    # interleaves low and high bytes to bfloat16.
    numbers = np.asarray(table, jnp.bfloat16).view(np.uint16)
    lines = [
        ".reg .b32 w, index, half, few, many, low, high",
        f"prmt.b32 w, {word}, 0, 0x3120",
        "and.b32 index, w, 0x77777777",
        "shr.u32 half, w, 1",
        _and_or("half", "half", 0x44444444, 0x32103210),
    ]
    for odd in range(2):
        if odd:
            lines += ["shr.u32 index, index, 16", "shr.u32 half, half, 16"]
        for name, table in (("low", numbers & 255), ("high", numbers >> 8)):
            a, b, c, d = (f"0x{t:08x}" for t in table.astype(np.uint8).view(np.uint32))
            lines += [
                f"prmt.b32 few, {a}, {b}, index",
                f"prmt.b32 many, {c}, {d}, index",
                f"prmt.b32 {name}, few, many, half",
            ]
        lines += [
            f"prmt.b32 ${odd}, low, high, 0x6240",
            f"prmt.b32 ${2 + odd}, low, high, 0x7351",
        ]
    return lines


def in_order_of_words(x: Float[Array, "m k"], p: int, unit: int) -> Float[Array, "m k"]:
    """Permutes each `unit` columns of `x` to the order in which `in_registers` decodes
    the codes of a weight, `p` to a byte."""
    m, k = x.shape
    # The index of a byte among 16 is two bits for its thread, then two bits for its
    # place in the word of that thread.
    x = x.reshape(m, k // unit, unit // (16 * p), 2, 2, 2, 2, p)
    return x.transpose(0, 1, 7, 2, 6, 4, 3, 5).reshape(m, k)


def columns(word: int, p: int, unit: int) -> list[int]:
    """Returns the groups of eight columns, in an operand of `wgmma`, to which the pairs
    of the thread's `word`th word belong."""
    return [(i // 2) * (unit // p // 8) + 2 * word + i % 2 for i in range(2 * p)]


def in_registers(
    codes: Array, points: Points, unit: int
) -> list[BFloat16[Array, "n u"]]:
    """Decodes the bytes of a tile, loaded in the layout `WGMMA_UPCAST_2X`, to operands
    of `wgmma` of `unit` columns each."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    _, plgpu = mosaic_gpu()
    n, j = codes.shape
    p, text = points.per_byte, ptx(points)
    words = unit // p // 16
    layout = plgpu.Layout.WGMMA
    operand = plgpu.ShapeDtypeStruct((n, unit), jnp.bfloat16, layout)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_UPCAST_2X,),
        return_type=[operand] * (j * p // unit),
    )
    def decode(_, codes):
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        pairs = llvm.StructType.get_literal((i32,) * (2 * p))
        constraints = ",".join(["=r"] * (2 * p) + ["r"])
        # A thread holds words, and pairs, of two rows.
        loaded = codes.registers.reshape(-1, words, 2)
        shape = layout.to_mgpu().registers_shape((n, unit))
        operands = []
        for some in loaded:
            registers = np.empty((unit // 8, 2), object)
            for word, row in np.ndindex(words, 2):
                bits = mgpu.utils.bitcast(some[word, row], i32)
                decoded: Any = llvm.inline_asm(pairs, [bits], text, constraints)
                for i, column in enumerate(columns(word, p, unit)):
                    bits = llvm.extractvalue(i32, decoded, (i,))
                    registers[column, row] = mgpu.utils.bitcast(bits, pair)
            operands.append(
                mgpu.FragmentedArray(
                    _registers=registers.reshape(shape),
                    _layout=layout.to_mgpu(),
                    _is_signed=None,
                )
            )
        return operands

    return decode(codes)


def interpreted(
    codes: Array, points: Points, unit: int
) -> list[BFloat16[Array, "n u"]]:
    """`in_registers` in JAX operations, for Pallas' interpreter."""
    p = points.per_byte
    n, j = codes.shape
    if p > 1:
        codes = jnp.stack(digits(codes, 2 ** (8 // p)), axis=-1).reshape(n, j * p)
    if points.float8 is not None:
        bits = lax.bitcast_convert_type(codes, points.float8)
        found = bits.astype(jnp.float32)
    elif points.table is not None:
        codes = codes.astype(jnp.int32)
        chosen = [
            jnp.where(codes == i, np.float32(number), np.float32(0))
            for i, number in enumerate(points.table)
        ]
        found = ft.reduce(operator.add, chosen)
    elif points.whole is not None:
        found = codes.astype(jnp.int32) - 128 * (points.whole == "unsigned")
    else:
        codes = codes.astype(jnp.int32) & 127
        found = codes + 128 if points.zero is None else codes - points.zero
    found = in_order_of_words(found.astype(jnp.bfloat16), p, unit)
    return [found[:, i : i + unit] for i in range(0, j * p, unit)]
