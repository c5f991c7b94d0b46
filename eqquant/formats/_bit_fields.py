from typing import NamedTuple, TypeAlias


class BitField(NamedTuple):
    """Some of the bits of a code, and where they are stored.

    - `byte`: the byte that holds them.
    - `start`: the lowest of them in that byte.
    - `number`: how many there are.
    - `at`: the lowest of them in the code.
    """

    byte: int
    start: int
    number: int
    at: int


# A packing as data: which bits of which bytes make a code. A kernel that reads this
# reads every packing.
Code: TypeAlias = tuple[BitField, ...]


def stream_fields(bits: int, number: int) -> tuple[Code, ...]:
    """The first codes of a stream of bits, as `pack_bits` writes it."""

    def code(i):
        byte, start = divmod(bits * i, 8)
        here = min(bits, 8 - start)
        first = BitField(byte, start, here, 0)
        if here == bits:
            return (first,)
        return first, BitField(byte + 1, 0, bits - here, here)

    return tuple(map(code, range(number)))


def plane_fields(
    byte: int, size: int, bits: int, width: int, at: int = 0
) -> tuple[Code, ...]:
    """The codes of `size` bytes from `byte` on, packed as in `gguf._base.planes`: from
    each `width` bytes, first the lowest bits of each, then the next, and so on."""
    planes = 8 // bits

    def code(i):
        group, i = divmod(i, width * planes)
        plane, i = divmod(i, width)
        return (BitField(byte + group * width + i, plane * bits, bits, at),)

    return tuple(map(code, range(size * planes)))


def joined(*parts: tuple[Code, ...]) -> tuple[Code, ...]:
    """Codes whose bits are in several places."""
    return tuple(sum(fields, ()) for fields in zip(*parts, strict=True))


def packed_fields(codes: tuple[Code, ...], radix: int) -> tuple[Code, ...]:
    """The bytes into which `pack` writes codes, for a `radix` that is a power of
    two."""
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
    """A number of so many bytes from `byte` on, the lowest first."""
    return (tuple(BitField(byte + i, 0, 8, 8 * i) for i in range(size)),)
