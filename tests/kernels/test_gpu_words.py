import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.kernels.gpu._words import (
    columns,
    in_order_of_words,
    interpreted,
    of_bytes,
    points_of,
    ptx,
    to_bytes,
)


every = pytest.mark.parametrize(
    "format",
    (
        eqq.NF4(),
        eqq.Int4(),
        eqq.Int4(symmetric=False),
        eqq.Int8(),
        eqq.Int(8, 64, "minimum"),
        eqq.FP8(),
        eqq.FP8("e5m2"),
        eqq.Ternary(radix=4),
    ),
    ids=str,
)


def emulate(text, word):
    """What a thread's instructions make of a word; or of many, as many threads."""
    registers = {}
    number = max(map(int, re.findall(r"\$(\d+)", text)))
    registers[f"${number}"] = word
    full = lambda x: np.full_like(word, x)
    value = lambda name: registers[name] if name in registers else full(int(name, 0))
    for line in text.strip("{}\n").split("\n"):
        name, _, rest = line.strip().rstrip(";").partition(" ")
        if name == ".reg":
            continue
        where = full(1) > 0
        if name.startswith("@"):
            where = registers[name[1:]]
            name, _, rest = rest.partition(" ")
        out, *operands = [operand.strip() for operand in rest.split(",")]
        operands = [value(operand) for operand in operands]
        new = _instructions[name](*operands)
        old = registers.get(out, new)
        registers[out] = np.where(where, new, old)
    return [registers[f"${i}"] for i in range(number)]


def _prmt(a, b, selector):
    table = np.stack([(x >> np.uint32(8 * i)) & 255 for x in (a, b) for i in range(4)])
    found = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & 15
        assert np.all(nibble < 8)  # Or else the sign of the byte is taken.
        byte = np.take_along_axis(table, nibble[None].astype(np.int64), 0)[0]
        found |= byte << np.uint32(8 * i)
    return found


def _lop3(a, b, c, function):
    assert np.all(function == 0xEA)
    return (a & b) | c


def _of_pairs(function):
    def instruction(a, b):
        a, b = (np.ascontiguousarray(x).view(jnp.bfloat16) for x in (a, b))
        return function(a, b).view(np.uint32)

    return instruction


_instructions = {
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "add.u32": np.add,
    "mul.lo.u32": np.multiply,
    "setp.ne.u32": np.not_equal,
    "mov.b32": lambda a: a,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "sub.rn.bf16x2": _of_pairs(np.subtract),
    "mul.rn.bf16x2": _of_pairs(np.multiply),
}


def same(a, b):
    # (Of NaNs in bfloat16, NumPy does not know that they are.)
    a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
    np.testing.assert_array_equal(a, b)


def numbers(format):
    """What each code is decoded to, in bfloat16."""
    points = points_of(format)
    codes = np.arange(2 ** (8 // points.per_byte)).astype(np.uint8)
    if isinstance(format, eqq.Int8):
        # -128 is no code, but it is a byte.
        return codes.view(np.int8).astype(jnp.bfloat16)
    found = np.asarray(format.to_points(jnp.asarray(codes))).astype(jnp.float32)
    return (found + points.excess).astype(jnp.bfloat16)


# Every word of which the bytes are like any two, and words at random.
@every
def test_instructions(format):
    byte = np.arange(256, dtype=np.uint32)
    first, second = (a.reshape(-1) for a in np.meshgrid(byte, byte))
    random = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32)
    words = np.concatenate(
        [first | second << 8 | first << 16 | second << 24, first << 16 | second, random]
    ).astype(np.uint32)
    reading, points = points_of(format), numbers(format)
    p = reading.per_byte
    found = emulate(ptx(reading), words)
    assert len(found) == 2 * p
    bits, mask = 8 // p, 2 ** (8 // p) - 1
    for i, pairs in enumerate(found):
        pairs = pairs[:, None].view(jnp.bfloat16)
        for half in range(2):
            byte = 2 * half + i % 2
            codes = (words >> np.uint32(8 * byte + bits * (i // 2))) & np.uint32(mask)
            same(pairs[:, half], points[codes])


@pytest.mark.parametrize(
    "p, unit", ((1, 64), (1, 32), (1, 16), (2, 64), (2, 32), (4, 64))
)
def test_order_of_words(p, unit):
    k = 3 * unit
    order = np.asarray(in_order_of_words(jnp.arange(2.0 * k).reshape(2, k), p, unit))
    for row, part in enumerate(order):
        units = part.reshape(3, unit) - row * k
        for i, some in enumerate(units):
            assert sorted(some) == list(range(i * unit, (i + 1) * unit))


def places(layout, shape):
    """The number that is in a thread's register, at a place of its vector."""
    a = np.arange(math.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        rank = len(tile)
        lead, sizes = a.shape[:-rank], a.shape[-rank:]
        split = [s for size, t in zip(sizes, tile) for s in (size // t, t)]
        a = a.reshape(*lead, *split)
        outer = [len(lead) + 2 * i for i in range(rank)]
        a = a.transpose(*range(len(lead)), *outer, *[i + 1 for i in outer])
    threads = [*layout.warp_dims, *layout.lane_dims, layout.vector_dim]
    threads = [i + a.ndim for i in threads]
    registers = [i for i in range(a.ndim) if i not in threads]
    vector = a.shape[layout.vector_dim]
    return a.transpose(*registers, *threads).reshape(-1, 128, vector)


# From the bytes of a tile to the operands of `wgmma`, through the registers of all
# threads: they hold what is computed where this is interpreted.
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="needs JAX 0.11.2")
@every
@pytest.mark.parametrize("unit", (32, 64))
def test_registers(format, unit):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    reading = points_of(format)
    n, j, p = 64, 64, reading.per_byte
    if unit < 16 * p:
        pytest.skip("a thread's word has codes of several blocks")
    code_bytes = np.random.default_rng(0).integers(0, 256, (n, j), np.uint8)
    loaded = plgpu.Layout.WGMMA_UPCAST_2X.to_mgpu()
    words = code_bytes.reshape(-1)[places(loaded, (n, j))].view(np.uint32)[..., 0]
    words = words.reshape(-1, unit // p // 16, 2, 128)
    layout = plgpu.Layout.WGMMA.to_mgpu()
    assert math.prod(layout.registers_shape((n, unit))) == unit // 8 * 2
    signed = reading.whole == "signed"
    codes = jnp.asarray(code_bytes.view(np.int8) if signed else code_bytes)
    for some, wanted in zip(words, interpreted(codes, reading, unit), strict=True):
        registers = np.empty((unit // 8, 2, 128), np.uint32)
        for word, row in np.ndindex(some.shape[:2]):
            pairs = emulate(ptx(reading), some[word, row])
            for column, bits in zip(columns(word, p, unit), pairs, strict=True):
                registers[column, row] = bits
        pairs = registers.reshape(-1, 128)[..., None].view(jnp.bfloat16)
        operand = np.empty((n * unit,), jnp.bfloat16)
        operand[places(layout, (n, unit))] = pairs
        same(operand.reshape(n, unit), wanted)


# Of formats whose codes the kernels do not read as they are.
@pytest.mark.examples(4)
@pytest.mark.parametrize(
    "format",
    (
        eqq.Int(3),
        eqq.Int(6, offset="minimum"),
        eqq.Int(7, offset="zero_point"),
        eqq.Int(2, 16),
        eqq.FP4(16),
        eqq.Ternary(),
        eqq.Binary(),
    ),
    ids=str,
)
def test_bytes(format):
    reading = of_bytes(format)
    codes = np.random.default_rng(0).integers(0, format.levels, (64, 64), np.uint8)
    found = to_bytes(format.pack(jnp.asarray(codes)), format)[:, :64]
    words = np.asarray(found).view(np.uint32)
    pairs = np.stack(emulate(ptx(reading), words), axis=-1)
    # Of bytes 0 and 2, and of bytes 1 and 3.
    decoded = pairs.view(jnp.bfloat16).reshape(64, 16, 2, 2).swapaxes(-1, -2)
    points = np.asarray(format.to_points(jnp.asarray(codes)), np.float32)
    wanted = (points + reading.excess).astype(jnp.bfloat16)
    same(decoded.reshape(64, 64), wanted)


def test_no_reading():
    assert of_bytes(eqq.NF4(16)) is None
    assert points_of(eqq.Dynamic8()) is None and of_bytes(eqq.Dynamic8()) is None
