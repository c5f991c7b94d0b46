import functools as ft
import itertools as it

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer


@ft.cache
def per_byte(levels: int) -> int:
    """Returns the number of codes with this many levels that fit in a byte."""
    number = 1
    while levels ** (number + 1) <= 256:
        number += 1
    return number


def pack(codes: Integer[Array, "*b k"], levels: int) -> Integer[Array, "*b j"]:
    """Writes codes `0, ..., levels - 1` as the digits of bytes, base `levels`. The
    first code is the lowest digit; missing codes of the last byte are zeros.

    If a byte holds one code, the codes are returned unchanged.
    """
    p = per_byte(levels)
    if p == 1:
        return codes
    *lead, k = codes.shape
    codes = jnp.pad(codes, [(0, 0)] * len(lead) + [(0, -k % p)])
    digits = codes.reshape(*lead, -(-k // p), p)
    weights = np.array([levels**i for i in range(p)], np.uint8)
    return jnp.sum(digits * weights.reshape((1,) * len(lead) + (1, p)), -1, jnp.uint8)


def unpack(
    packed: Integer[Array, "*b j"], levels: int, tail: int
) -> Integer[Array, "*b k"]:
    """The inverse of `pack`, without the last `tail` codes."""
    *lead, j = packed.shape
    p = per_byte(levels)
    codes = jnp.stack(digits(packed, levels), axis=-1) if p > 1 else packed
    return codes.reshape(*lead, j * p)[..., : j * p - tail]


def digits(packed: Integer[Array, "*j"], levels: int) -> list[Integer[Array, "*j"]]:
    """Returns the first code of each byte, the second, and so on."""
    p = per_byte(levels)
    if p == 1:
        return [packed]
    if levels & (levels - 1) == 0:
        bits = levels.bit_length() - 1
        mask = np.uint8(levels - 1)
        return [(packed >> np.uint8(bits * i)) & mask for i in range(p)]
    # (Each quotient is computed from the bytes: a single code takes few operations.)
    bytes = packed.astype(jnp.uint16)
    quotients = [bytes, *(_divided(bytes, levels**i) for i in range(1, p + 1))]
    return [
        (low - high * np.uint16(levels)).astype(jnp.uint8)
        for low, high in zip(quotients[:-1], quotients[1:])
    ]


def _divided(x, divisor):
    factor, more, shift = map(np.uint16, as_product(divisor))
    return (x * factor + more if more > 0 else x * factor) >> shift


@ft.cache
def as_product(divisor: int) -> tuple[int, int, int]:
    """Returns how to divide every byte within 16 bits: multiply by a factor, add a
    number, and shift right."""
    x = np.arange(256)
    # For most divisors, the reciprocal rounded up is exact enough. If its product with
    # a byte would need more bits, it is rounded down, and one is added to each byte.
    for up, shift in it.product((True, False), range(16)):
        factor = -(-(2**shift) // divisor) if up else 2**shift // divisor
        more = 0 if up else factor
        product = x * factor + more
        if product[-1] < 2**16 and np.all(product >> shift == x // divisor):
            return factor, more, shift
    raise AssertionError(divisor)
