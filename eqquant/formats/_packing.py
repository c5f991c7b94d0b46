import functools as ft

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer


@ft.cache
def per_byte(levels: int) -> int:
    """How many codes of this many levels fit in a byte."""
    number = 1
    while levels ** (number + 1) <= 256:
        number += 1
    return number


def pack(codes: Integer[Array, "*b k"], levels: int) -> Integer[Array, "*b j"]:
    """Writes codes `0, ..., levels - 1` as the digits of bytes, base `levels`. The
    first code is the lowest digit; missing codes of the last byte are zeros.

    Where a byte holds one code, the codes are returned as they are.
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
    """The inverse of `pack`, less the last `tail` codes."""
    p = per_byte(levels)
    if p == 1:
        return packed
    *lead, j = packed.shape
    lanes = (1,) * (len(lead) + 1)
    if levels & (levels - 1) == 0:
        bits = levels.bit_length() - 1
        shifts = np.arange(0, bits * p, bits, dtype=np.uint8).reshape(*lanes, p)
        digits = (packed[..., None] >> shifts) & np.uint8(levels - 1)
    else:
        # `packed // levels**i` by a multiplication, exact for all 256 bytes.
        inverse = [-(-(2**16) // levels**i) for i in range(p + 1)]
        inverse = np.array(inverse, np.uint32).reshape(*lanes, p + 1)
        wide = packed[..., None].astype(jnp.uint32)
        high = (wide * inverse[..., :-1]) >> np.uint32(16)
        higher = (wide * inverse[..., 1:]) >> np.uint32(16)
        digits = (high - higher * np.uint32(levels)).astype(jnp.uint8)
    return digits.reshape(*lead, j * p)[..., : j * p - tail]
