import functools as ft
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float

from ...formats import AbstractFormat, AbstractGrid, digits, Int8, NF4
from ..cpu._codes import integer_step
from ._pallas import mosaic_gpu


# Decoding of the bytes of a weight to an operand of `wgmma`, in registers.
#
# A thread loads words of four bytes, and decodes the codes of a word to pairs of
# bfloat16, two to a register: the first codes of bytes 0 and 2, then of bytes 1 and 3,
# then the second codes of bytes 0 and 2, and so on. The layout of `wgmma` assigns these
# registers to other columns than those of the codes. That permutes the contracted axis,
# which changes nothing if the columns of `x` are permuted alike (`in_order_of_words`).
# So no code has to move to another thread.


def per_byte(format: AbstractFormat) -> int:
    """The number of codes in a byte, each of a whole number of bits."""
    return int(8 // format.bits)


def offset(format: AbstractFormat) -> int | None:
    """The code of zero. `None` if the points are not integers, or if each block has a
    zero-point of its own."""
    assert isinstance(format, AbstractGrid)
    step = integer_step(format)
    return None if step is None or format.offset is not None else -step[1]


def ptx(format: AbstractFormat) -> str:
    """PTX that decodes a word, the last operand, to pairs of bfloat16, the operands
    `$0`, `$1` and so on. It applies neither scales nor the zero-points of blocks."""
    p = per_byte(format)
    if isinstance(format, NF4):
        lines = _lookups(f"${2 * p}")
    elif isinstance(format, Int8):
        lines = _signed_bytes(f"${2 * p}")
    else:
        lines = _unsigned(f"${2 * p}", p, offset(format))
    return "{\n" + "\n".join(f"{line};" for line in lines) + "\n}"


# Two times 128 in bfloat16, whose 7 mantissa bits are zero and count ones: `or` with an
# integer below 128 adds that integer.
_128 = 0x43004300


def _unsigned(word, p, zero):
    # Shift a code to the low bits of each half, mask it, and `or` it into 128. Then
    # subtract 128 and the code of zero; with zero-points, the caller does.
    bits = 8 // p
    mask = (1 << bits) - 1
    lines = [".reg .b32 w"]
    for i in range(p):
        for odd in range(2):
            out, shift = f"${2 * i + odd}", bits * i + 8 * odd
            lines += [
                f"shr.u32 w, {word}, {shift}",
                _and_or("w" if zero else out, "w", mask * 0x10001, _128),
            ]
            if zero:
                lines += [
                    f"mov.b32 {out}, 0x{_128 + zero * 0x10001:08x}",
                    f"sub.rn.bf16x2 {out}, w, {out}",
                ]
    return lines


def _and_or(out, word, mask, others):
    # 0xea is the truth table of `(a & b) | c`.
    return f"lop3.b32 {out}, {word}, 0x{mask:08x}, 0x{others:08x}, 0xea"


def _signed_bytes(word):
    # A signed byte is its low seven bits, minus 128 if the sign bit is set. Both terms
    # are made with 128 added: the first as in `_unsigned`; the second is 128, or 256
    # if the sign is set, since that bit is the lowest of bfloat16's exponent.
    lines = [".reg .b32 w, low, sign"]
    for odd in range(2):
        lines += [
            f"shr.u32 w, {word}, {8 * odd}",
            _and_or("low", "w", 0x007F007F, _128),
            _and_or("sign", "w", 0x00800080, _128),
            f"sub.rn.bf16x2 ${odd}, low, sign",
        ]
    return lines


def _lookups(word):
    # `prmt` looks up four codes of three bits in a table of eight bytes. So the 16
    # points take two tables for their low bytes and two for their high bytes. The
    # fourth bit of each code chooses between the two (`half`), and a last `prmt`
    # interleaves low and high bytes to bfloat16.
    numbers = NF4.codebook.astype(jnp.bfloat16).view(np.uint16)
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
    # The index of a byte among 16 is two bits of its thread, then two of its place in
    # the word of that thread.
    x = x.reshape(m, k // unit, unit // (16 * p), 2, 2, 2, 2, p)
    return x.transpose(0, 1, 7, 2, 6, 4, 3, 5).reshape(m, k)


def columns(word: int, p: int, unit: int) -> list[int]:
    """The groups of eight columns, in an operand of `wgmma`, to which the pairs of the
    thread's `word`th word belong."""
    return [(i // 2) * (unit // p // 8) + 2 * word + i % 2 for i in range(2 * p)]


def in_registers(
    codes: Array, format: AbstractFormat, unit: int
) -> list[BFloat16[Array, "n u"]]:
    """Decodes the bytes of a tile, loaded in the layout `WGMMA_UPCAST_2X`, to operands
    of `wgmma` of `unit` columns each."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    _, plgpu = mosaic_gpu()
    n, j = codes.shape
    p, text = per_byte(format), ptx(format)
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
    codes: Array, format: AbstractFormat, unit: int
) -> list[BFloat16[Array, "n u"]]:
    """`in_registers` in operations of JAX, for Pallas' interpreter."""
    p = per_byte(format)
    n, j = codes.shape
    if p > 1:
        codes = jnp.stack(digits(codes, 2 ** (8 // p)), axis=-1).reshape(n, j * p)
    codes = codes.astype(jnp.int32)
    if isinstance(format, NF4):
        chosen = [
            jnp.where(codes == i, np.float32(number), np.float32(0))
            for i, number in enumerate(NF4.codebook)
        ]
        points = ft.reduce(operator.add, chosen)
    elif isinstance(format, Int8):
        points = codes
    else:
        zero = offset(format)
        points = codes + 128 if zero is None else codes - zero
    points = in_order_of_words(points.astype(jnp.bfloat16), p, unit)
    return [points[:, i : i + unit] for i in range(0, j * p, unit)]
