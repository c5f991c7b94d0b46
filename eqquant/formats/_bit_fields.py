import functools as ft
from typing import NamedTuple, TypeAlias


class BitField(NamedTuple):
    """Some of the bits of a code, and their place in memory.

    - `byte`: the byte that holds them.
    - `start`: the lowest of them in that byte.
    - `number`: how many there are.
    - `at`: the lowest of them in the code.
    """

    byte: int
    start: int
    number: int
    at: int


# A packing as data: the bits of bytes that make up a code. A kernel that reads this
# description reads every packing.
Code: TypeAlias = tuple[BitField, ...]


def bits_of(byte: int, start: int, number: int, at: int = 0) -> Code:
    """Returns the field of `number` bits, from the bit `start` of a byte on. It
    continues in the next bytes, whose bits are higher in the code."""
    byte, start = byte + start // 8, start % 8
    here = min(number, 8 - start)
    rest = bits_of(byte + 1, 0, number - here, at + here) if here < number else ()
    return (BitField(byte, start, here, at), *rest)


def stream_fields(bits: int, number: int) -> tuple[Code, ...]:
    """Returns the first codes of a stream of bits, as written by `pack_bits`."""
    return tuple(bits_of(0, bits * i, bits) for i in range(number))


def plane_fields(
    byte: int, size: int, bits: int, width: int, at: int = 0
) -> tuple[Code, ...]:
    """Returns the codes of `size` bytes from `byte` on, in GGUF's usual packing: of
    each `width` bytes, first the lowest bits of each, then the next, and so on."""
    planes = 8 // bits

    def code(i):
        group, i = divmod(i, width * planes)
        plane, i = divmod(i, width)
        return (BitField(byte + group * width + i, plane * bits, bits, at),)

    return tuple(map(code, range(size * planes)))


def joined(*parts: tuple[Code, ...]) -> tuple[Code, ...]:
    """Joins codes whose bits are in several places."""
    return tuple(sum(fields, ()) for fields in zip(*parts, strict=True))


def packed_fields(codes: tuple[Code, ...], radix: int) -> tuple[Code, ...]:
    """Returns the bytes into which `pack` writes codes, for a `radix` that is a power
    of two."""
    bits = radix.bit_length() - 1
    number = 8 // bits

    def byte(i):
        return tuple(
            field._replace(at=field.at + bits * place)
            for place, code in enumerate(codes[i : i + number])
            for field in code
        )

    return tuple(byte(i) for i in range(0, len(codes), number))


def byte_fields(byte: int, size: int) -> tuple[Code, ...]:
    """Returns the field of a number of `size` bytes from `byte` on, the lowest
    first."""
    return (bits_of(byte, 0, 8 * size),)


@ft.cache
def inverse(codes: tuple[Code, ...], size: int) -> tuple[Code, ...]:
    """Returns the origin of the bits of `size` bytes: each byte as a code, with the
    index of a code in place of the index of a byte."""
    found: list[list[BitField]] = [[] for _ in range(size)]
    for i, code in enumerate(codes):
        for byte, start, number, at in code:
            found[byte].append(BitField(i, at, number, start))
    return tuple(tuple(sorted(byte, key=lambda field: field.at)) for byte in found)
