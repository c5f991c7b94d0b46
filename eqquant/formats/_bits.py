import functools as ft
import math
import operator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer


# Codes of any number of bits, one after another from the lowest bit of the first byte
# on. Codes and bytes end together after a unit of one byte, or of as many bytes as a
# code has bits.


def _unit(bits):
    # The number of codes of a unit, and its number of bytes.
    number = 8 // math.gcd(bits, 8)
    return number, number * bits // 8


def pack_bits(codes: Integer[Array, "*b k"], bits: int) -> Integer[Array, "*b j"]:
    """Writes codes `0, ..., 2**bits - 1` with no bits between them. Missing codes of
    the last unit are zeros."""
    number, size = _unit(bits)
    *lead, k = codes.shape
    units = -(-k // number)
    padding = [(0, 0)] * len(lead) + [(0, units * number - k)]
    codes = jnp.pad(codes.astype(jnp.uint8), padding).reshape(*lead, units, number)

    def byte(j):
        starts = [bits * i - 8 * j for i in range(number)]
        parts = [
            _shifted(codes[..., i], start)
            for i, start in enumerate(starts)
            if -bits < start < 8
        ]
        return ft.reduce(operator.or_, parts)

    packed = jnp.stack([byte(j) for j in range(size)], axis=-1)
    return packed.reshape(*lead, units * size)


def unpack_bits(
    packed: Integer[Array, "*b j"], bits: int, tail: int
) -> Integer[Array, "*b k"]:
    """The inverse of `pack_bits`, without the last `tail` codes."""
    number, size = _unit(bits)
    *lead, j = packed.shape
    units = j // size
    packed = packed.reshape(*lead, units, size)
    mask = np.uint8(2**bits - 1)

    def code(i):
        byte, start = divmod(bits * i, 8)
        found = _shifted(packed[..., byte], -start)
        if start + bits > 8:
            found |= _shifted(packed[..., byte + 1], 8 - start)
        return found & mask

    codes = jnp.stack([code(i) for i in range(number)], axis=-1)
    return codes.reshape(*lead, units * number)[..., : units * number - tail]


def number_of_codes(size: int, bits: int) -> int:
    """Returns the number of codes that fit in `size` bytes."""
    number, unit = _unit(bits)
    return size // unit * number


def _shifted(byte, start):
    return byte << np.uint8(start) if start >= 0 else byte >> np.uint8(-start)
