import math
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Inexact, UInt8, UInt32

from ._base import AbstractFormat, Stored
from ._check import check_choice
from ._hadamard import hadamard
from ._scale import from_bits
from ._viterbi import to_states


def _as_bits(bits: Any) -> int | float:
    if isinstance(bits, bool) or not isinstance(bits, int | float | np.number):
        raise TypeError(
            f"`bits` should be a number from 1 to 8. Got {bits!r}, of type "
            f"{type(bits).__name__}."
        )
    return int(bits) if math.isfinite(bits) and bits == int(bits) else float(bits)


class EXL3(AbstractFormat):
    """The matrices of EXL3 files, which exllamav3 writes, for reading and writing these
    files. Both axes of a matrix are multiplied by signs and scales, and blocks of 128
    numbers along each by a Hadamard matrix. The result is stored in trellis codes: a
    tile of 16 x 16 numbers is a cyclic stream of bits, and each number is a function of
    16 of them.

    A matrix has a multiple of 128 rows and columns. Groups of 128 rows are stored
    together: indexing rows decodes the matrix, and taking a part of a group is an
    error. Nothing can be quantized in this format; codes of the same kind are
    [`eqquant.Trellis`][] in [`eqquant.Rotated`][].

    - `bits`: the number of bits of a code: 1 to 8. Or 1.5 to 7.5: codes of 2 and of 3
        bits in turn take 2.5.
    - `code`: the function from 16 bits to a number, as exllamav3 names it: `"3inst"`,
        `"mcg"` or `"mul1"`. Half bits need `"mul1"`.

    Products multiply the other operand by signs, scales and Hadamard matrices, and then
    decode some rows of tiles at a time.

    !!! Example

        ```python
        checkpoint = eqquant.interop.open("folder", "exl3")
        checkpoint["lm_head.weight"].format  # EXL3(6)
        ```

    ??? cite "Reference"

        `doc/exl3.md`, `exl3.py`, `codebook.cuh`, `pack.cu` and `frac.cu` of exllamav3.

        QTIP: Quantization with Trellises and Incoherence Processing. Tseng et al.,
        2024.
    """

    bits: int | float = eqx.field(  # pyright: ignore
        default=3, static=True, converter=_as_bits
    )
    code: Literal["3inst", "mcg", "mul1"] = eqx.field(default="mul1", static=True)
    block_size: ClassVar[None] = None
    tile: ClassVar[int] = 128
    rows_together: ClassVar[int] = 128

    def __check_init__(self):
        _check(self.bits, self.code)

    @property
    def tiles(self) -> "_EXL3Tiles":
        """The format of the codes alone."""
        return _EXL3Tiles(self.bits, self.code)

    def encode(self, w, scale=None):
        raise ValueError(
            f"Nothing can be quantized in {self}, which is for reading and writing "
            "EXL3 files. Quantize in `Rotated(Trellis(bits))` instead."
        )

    def structs(self, shape):
        if len(shape) < 2:
            raise ValueError(f"{self} stores matrices. Got the shape {tuple(shape)}.")
        *lead, n, k = shape
        k = -(-k // 128) * 128
        return {
            **self.tiles.structs((*lead, n, k)),
            "suh": jax.ShapeDtypeStruct((*lead, 1, k), jnp.uint16),
            "svh": jax.ShapeDtypeStruct((*lead, n, 1), jnp.uint16),
        }

    def decode(self, stored, tail):
        self.shape(stored, tail)  # checks that no rows are missing
        suh, svh = self.scales(stored)
        w = self.rotate(self.tiles.decode(stored, tail)) * suh
        return self.rotate(w.swapaxes(-1, -2)).swapaxes(-1, -2) * svh

    def rotate(self, x: Inexact[Array, "*b k"]) -> Inexact[Array, "*b k"]:
        """Multiplies blocks of 128 numbers by an orthonormal Hadamard matrix, which is
        its own inverse."""
        *lead, k = x.shape
        # XLA folds constants at compile time. Storing bytes keeps the program small.
        h = jnp.asarray(hadamard(128)).astype(x.dtype) / math.sqrt(128)
        blocks = x.reshape(*lead, k // 128, 128)
        return jnp.matmul(blocks, h, precision="highest").reshape(*lead, k)

    def scales(
        self, stored: Stored
    ) -> tuple[Float[Array, "*b 1 k"], Float[Array, "*b n 1"]]:
        """Returns the signs times scales of the columns and of the rows."""
        suh, svh = (from_bits(stored[name], _half) for name in ("suh", "svh"))
        return suh, svh

    def shape(self, stored, tail):
        *lead, n, k = self.tiles.shape(stored, tail)
        if n % 128 != 0 or k % 128 != 0:
            raise ValueError(
                f"{self} stores 128 rows and columns of a matrix together. Got a part "
                f"of {n} x {k}. Call `dequantize` first."
            )
        return (*lead, n, k)


class _EXL3Tiles(AbstractFormat):
    """The numbers of `EXL3` before they are rotated. Each row holds a sixteenth of the
    bytes of its tiles.

    - `bits`, `code`: as in `EXL3`.
    """

    bits: int | float = eqx.field(default=3, static=True)  # pyright: ignore
    code: Literal["3inst", "mcg", "mul1"] = eqx.field(default="mul1", static=True)
    block_size: ClassVar[None] = None
    tile: ClassVar[int] = 16
    rows_together: ClassVar[int] = 16

    def __repr__(self):
        return f"the tiles of {EXL3(self.bits, self.code)}"

    def encode(self, w, scale=None):
        raise ValueError(f"Nothing can be quantized in {self}.")

    def structs(self, shape):
        *lead, k = shape
        size = -(-k // 16) * self._bytes
        return {"codes": jax.ShapeDtypeStruct((*lead, size), jnp.uint8)}

    def shape(self, stored, tail):
        *lead, size = stored["codes"].shape
        return (*lead, size // self._bytes * 16 - tail)

    def decode(self, stored, tail):
        *lead, n, size = stored["codes"].shape
        number = size // self._bytes
        words = _words(stored["codes"].reshape(*lead, n // 16, 16, number, self._bytes))
        points = _points(self._states(words), self.code)
        # The order of a tile, in which tensor cores read their operands: consecutive
        # numbers are in neighbouring columns of `W`, then eight columns apart, then
        # eight rows apart; and so on.
        rows = points.reshape(*lead, n // 16, 8, 4, 2, 2, 2, number)
        i = len(lead)
        order = (0, 3, 1, 6, 4, 2, 5)
        rows = rows.transpose(*range(i), *[i + axis for axis in order])
        return rows.reshape(*lead, n, number * 16)[..., : number * 16 - tail]

    def _states(self, words: UInt32[Array, "*b w t"]) -> UInt32[Array, "*b e t"]:
        # In reverse order, the words of a tile are a stream from the lowest bit on.
        words = words[..., ::-1, :]
        following = jnp.roll(words, -1, axis=-2)
        low = int(self.bits)
        if low == self.bits:
            return to_states(words, following, 16, low)[..., ::-1, :]
        # Of each two numbers, the second has one bit more. In reverse order, it is the
        # first.
        second = to_states(words, following, 16 + low + 1, 2 * low + 1)
        both = jnp.stack([second, second >> np.uint32(low + 1)], axis=-2)
        *lead, number, _, tiles = both.shape
        both = both.reshape(*lead, number * 2, tiles) & np.uint32(0xFFFF)
        return both[..., ::-1, :]

    @property
    def _bytes(self) -> int:
        # Of a row in each of its tiles.
        return int(2 * self.bits)


def _words(codes: UInt8[Array, "*b a r t s"]) -> UInt32[Array, "*b a w t"]:
    """Returns the words of each tile, from the bytes of its rows."""
    *lead, a, r, t, s = codes.shape
    codes = codes.swapaxes(-2, -3).reshape(*lead, a, t, r * s // 4, 4)
    return lax.bitcast_convert_type(codes, jnp.uint32).swapaxes(-1, -2)


def _points(states: UInt32[Array, "*s"], code: str) -> Float[Array, "*s"]:
    """Returns the number of each state, in float32."""
    half = lambda bits: from_bits(bits.astype(jnp.uint16), _half)
    if code == "mul1":
        hashed, every_other = states * np.uint32(0x83DCD12D), np.uint32(0xFF00FF)
        pairs = (hashed & every_other) + (hashed >> np.uint32(8) & every_other)
        total = (pairs & np.uint32(0xFFFF)) + (pairs >> np.uint32(16))
        # (The product is exact, so that only the sum is rounded.)
        point = (1024 + total.astype(jnp.float32)) * _scale + _offset
    else:
        factor, term = (89226354, 64248484) if code == "3inst" else (0xCBAC1FED, 0)
        hashed = states * np.uint32(factor) + np.uint32(term)
        hashed = hashed & np.uint32(0x8FFF8FFF) ^ np.uint32(0x3B603B60)
        point = half(hashed & np.uint32(0xFFFF)) + half(hashed >> np.uint32(16))
    # Rounds to float16, in which all of these numbers are normal or zero. (XLA may omit
    # a conversion there and back, and `lax.reduce_precision` takes much longer.)
    bits = lax.bitcast_convert_type(point, jnp.uint32)
    bits = bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    return lax.bitcast_convert_type(bits & np.uint32(0xFFFFE000), jnp.float32)


_half = np.dtype(np.float16)
# The float16 numbers of the bits 0x1EEE and 0xC931.
_scale, _offset = np.array([0x1EEE, 0xC931], np.uint16).view("f2").astype("f4")


def _check(bits, code):
    if not (1 <= bits <= 8 and 2 * bits == int(2 * bits)):
        raise ValueError(f"`bits` should be a multiple of 0.5 from 1 to 8. Got {bits}.")
    check_choice("code", code, "3inst", "mcg", "mul1")
    if code != "mul1" and bits != int(bits):
        raise ValueError(f"Only the code 'mul1' has half bits. Got {bits} of {code!r}.")
