import abc
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped, UInt8

from .._adjustable import AbstractAdjustable, Parameters
from .._base import AbstractComposite, AbstractFormat, Stored
from .._bit_fields import (
    byte_fields,
    Code,
    packed_fields,
    plane_fields,
)
from .._blocks import merge, split
from .._grid import AbstractGrid
from .._pieces import by_pieces
from .._scale import all_within, from_bits, nearest_scale, poison, to_bits
from ._fields import read, write, Zeros


class AbstractGGUF(AbstractFormat):
    """A type of tensors in GGUF files. A row in a file consists of blocks of
    `type_size` bytes, one for each `block_size` numbers.

    ??? cite "Reference"

        `ggml-common.h` and `ggml-quants.c` of ggml, and their Python version
        `gguf.quants`.
    """

    block_size: eqx.AbstractClassVar[int]
    type_size: eqx.AbstractClassVar[int]

    @abc.abstractmethod
    def from_blocks(self, blocks: UInt8[Array, "*b _"]) -> Stored:
        """Converts the rows of a file to stored arrays."""

    @abc.abstractmethod
    def to_blocks(self, stored: Stored, tail: int) -> UInt8[Array, "*b _"]:
        """The inverse of `from_blocks`. A short last block is padded."""

    @property
    @abc.abstractmethod
    def stored_fields(self) -> dict[str, tuple[Code, ...]] | None:
        """`from_blocks` as data: the bits of a block that make up each element of the
        stored arrays. `None` if elements are computed otherwise."""

    @abc.abstractmethod
    def without_infinities(self, stored: Stored) -> Stored:
        """Replaces infinite scales and minima by NaN. (`encode` writes infinities where
        ggml does: for numbers that are too large for float16.)"""


class AbstractGGUFGrid(AbstractGGUF, AbstractGrid):
    """A type whose blocks have one scale, and a code for each number. The codes of a
    byte are consecutive, unlike in the file.

    - `scale_at`: the byte of a block at which its scale begins, in float16.
    - `signed`: whether codes are signed integers of 8 bits.
    """

    scale_at: eqx.AbstractClassVar[int]
    signed: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def fields(self) -> tuple[Code, ...] | None:
        """The places of the codes. `None` if they are not bits of the block."""

    def read_codes(self, blocks: UInt8[Array, "*b g t"]) -> UInt8[Array, "*b g s"]:
        """Returns a code for each number."""
        assert self.fields is not None
        return read(blocks, self.fields)

    def join_blocks(
        self, codes: UInt8[Array, "*b g s"], scale: UInt8[Array, "*b g 2"]
    ) -> UInt8[Array, "*b g t"]:
        """Returns the bytes of blocks, from their codes and the two bytes of their
        scale."""
        assert self.fields is not None
        return write(codes, self.fields, scale, self.scale_at, self.type_size)

    def encode(self, w, scale=None):
        # Unlike in other grids, the codes are chosen before the scale is rounded.
        blocks, size = split(w, self.block_size)
        scale = self.fit(blocks, size) if scale is None else scale[..., None]
        codes = self.to_codes(blocks, size, scale)
        codes = merge(codes, w.shape[-1])
        scale = poison(scale, blocks)[..., 0].astype(jnp.float16)
        return {
            "codes": self.pack(codes),
            "scale": lax.bitcast_convert_type(scale, jnp.uint16),
        }

    def without_infinities(self, stored):
        largest = stored["scale"] & np.uint16(0x7C00) == np.uint16(0x7C00)
        nan = jnp.where(largest, np.uint16(0x7E00), stored["scale"])
        return stored | {"scale": nan}

    @property
    def stored_fields(self):
        if self.fields is None or self.radix is None:
            return None
        codes = packed_fields(self.fields, self.radix)
        return {"codes": codes, "scale": byte_fields(self.scale_at, 2)}

    def from_blocks(self, blocks):
        blocks = as_blocks(blocks, self.type_size)
        codes = in_rows(self.read_codes(blocks))
        if self.signed:
            codes = lax.bitcast_convert_type(codes, jnp.int8)
        scale = blocks[..., self.scale_at : self.scale_at + 2]
        return {
            "codes": self.pack(codes),
            "scale": lax.bitcast_convert_type(scale, jnp.uint16),
        }

    def to_blocks(self, stored, tail):
        codes = self.unpack(stored["codes"], tail)
        zero = 0 if self.signed else self.levels // 2
        codes = split_codes(codes, self.block_size, zero)
        if self.signed:
            codes = lax.bitcast_convert_type(codes, jnp.uint8)
        scale = lax.bitcast_convert_type(stored["scale"], jnp.uint8)
        return in_rows(self.join_blocks(codes, scale))


class BlockFields(NamedTuple):
    """The places of the integers in the bytes of a block.

    - `codes`: the code of each number.
    - `steps`, `lows`: the scale and the minimum of each part, as multiples of the
        block's two scales in float16. Minima are subtracted. If a block has only one
        part, there are none, and the two numbers in float16 are its scale and minimum.
    - `zero`: the number that is subtracted from `steps`.
    - `signed`: whether `steps` are signed integers of 8 bits.
    """

    codes: tuple[Code, ...]
    steps: tuple[Code, ...] = ()
    lows: tuple[Code, ...] = ()
    zero: int = 0
    signed: bool = False


class AbstractGGUFBytes(AbstractGGUF, AbstractComposite):
    """A type whose blocks are stored as in the file: `stored["blocks"]`.

    - `base`: the grid of the decoded codes, with a scale for each `base.block_size`
        numbers, and a minimum if its `offset` is `"minimum"`.
    """

    base: eqx.AbstractClassVar[AbstractGrid]

    @abc.abstractmethod
    def split_blocks(
        self, blocks: UInt8[Array, "*b g t"]
    ) -> tuple[
        Integer[Array, "*b g s"], Float[Array, "*b g p"], Float[Array, "*b g p"] | None
    ]:
        """Returns the codes, the scales and the minima of the parts of blocks."""

    def decode(self, stored, tail):
        codes, scale, low = self._split(stored)
        codes = codes.reshape(*scale.shape, self._part)
        low = None if low is None else low[..., None]
        points = self.base.to_points(codes)
        numbers = in_rows(in_rows(self.base.numbers(points, scale[..., None], low)))
        return numbers[..., : numbers.shape[-1] - tail]

    def flat(self, stored, tail):
        codes, scale, low = self._split(stored)
        found = {"codes": self.base.pack(in_rows(codes)), "scale": _bits(scale)}
        return found if low is None else found | {"minimum": _bits(low)}

    def scales(self, stored, tail):
        return in_rows(self._split(stored)[1])

    @property
    def _part(self) -> int:
        size = self.base.block_size
        assert size is not None
        return size

    def _split(self, stored):
        return self.split_blocks(as_blocks(stored["blocks"], self.type_size))

    def shape(self, stored, tail):
        *lead, size = stored["blocks"].shape
        return (*lead, size // self.type_size * self.block_size - tail)

    @property
    def stored_fields(self):
        return {"blocks": plane_fields(0, self.type_size, 8, self.type_size)}

    def from_blocks(self, blocks):
        return {"blocks": blocks}

    def to_blocks(self, stored, tail):
        return stored["blocks"]


class AbstractGGUFBlocks(AbstractGGUFBytes, AbstractAdjustable):
    """A type whose blocks consist of bit fields.

    - `scale_at`: the byte of a block at which its scale begins, in float16.
    - `fields`: the places of the integers.
    """

    scale_at: eqx.AbstractClassVar[int]
    fields: eqx.AbstractClassVar[BlockFields]

    @property
    def halves(self) -> int:
        """The number of float16 numbers that begin at `scale_at`: two if there is a
        minimum."""
        return 1 if self.base.offset is None else 2

    @abc.abstractmethod
    def encode_blocks(self, blocks: Float[Array, "*b g s"]) -> UInt8[Array, "*b g t"]:
        """Encodes numbers to the bytes of blocks."""

    def split_blocks(self, blocks):
        parts = tuple(range(self.block_size // self._part))
        return read(blocks, self.fields.codes), *self.scales_of(blocks, parts)

    def codes_of(
        self,
        blocks: UInt8[Array, "*b t"],
        numbers: tuple[int, ...],
        zeros: Zeros | None = None,
    ) -> UInt8[Array, "..."]:
        """Returns the codes of some of the numbers of each block, of shape `*b s`. With
        `zeros`, each code is repeated as often as it has zeros, and the shape is
        `*b s _`: see `Zeros`."""
        return read(blocks, tuple(self.fields.codes[i] for i in numbers), zeros)

    def scales_of(
        self,
        blocks: UInt8[Array, "*b t"],
        parts: tuple[int, ...],
        zeros: Zeros | None = None,
    ) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
        """Returns the scales and the minima of some of the parts of each block, of
        shape `*b p`. With `zeros`, each is repeated as often as it has zeros, and the
        shape is `*b p _`: see `Zeros`."""
        fields = self.fields
        some = lambda codes: read(blocks, tuple(codes[part] for part in parts), zeros)
        # (Without `zeros`, a number that all parts share is read once.)
        times = 1 if zeros is None else len(parts)

        def float16_at(byte):
            bits = read(blocks, byte_fields(byte, 2) * times, zeros)
            bits = lax.bitcast_convert_type(bits, jnp.float16)
            return bits.astype(jnp.float32)

        scale, low = float16_at(self.scale_at), None
        if self.halves == 2:
            low = float16_at(self.scale_at + 2)
        # (Products of a float16 and an integer of so few bits are exact in float32.)
        if fields.steps:
            steps = some(fields.steps)
            if fields.signed:
                steps = lax.bitcast_convert_type(steps, jnp.int8)
            scale = scale * (steps.astype(jnp.float32) - fields.zero)
        if fields.lows:
            assert low is not None
            low = -(low * some(fields.lows).astype(jnp.float32))
        return scale, low

    @property
    def by_byte(self) -> Integer[np.ndarray, "c l"]:
        """The places of the numbers of a block. The numbers in a column have codes
        whose (first) bits are in the same byte."""
        bytes = np.array([code[0].byte for code in self.fields.codes])
        order = np.argsort(bytes, kind="stable")
        return order.reshape(np.unique(bytes).size, -1).T

    def join_blocks(
        self, codes: UInt8[Array, "*b g s"], scales: Stored
    ) -> UInt8[Array, "*b g t"]:
        """Returns the bytes of blocks, from their codes and scales. `scales` has the
        two scales in float16, `step` and `low`, as bytes, and if a block has several
        parts, their integers, `steps` and `lows`. `low` and `lows` are missing if there
        is no minimum."""
        fields = self.fields
        halves = [scales[name] for name in ("step", "low") if name in scales]
        if fields.steps:
            steps = (scales["steps"] + fields.zero).astype(jnp.int16)
            codes = jnp.concatenate([codes, steps.astype(jnp.uint8)], axis=-1)
        if fields.lows:
            codes = jnp.concatenate([codes, scales["lows"]], axis=-1)
        where = fields.codes + fields.steps + fields.lows
        scale = jnp.concatenate(halves, axis=-1)
        return write(codes, where, scale, self.scale_at, self.type_size)

    @property
    def grid(self):
        return self.base

    def candidates(self, blocks, size):
        return self.base.candidates(blocks, size)

    def held(self, parameters):
        half = np.dtype(np.float16)
        nearest = lambda x: from_bits(to_bits(nearest_scale(x, half), half), half)
        scale, offset = parameters
        return Parameters(nearest(scale), None if offset is None else nearest(offset))

    def settled(self, parameters):
        scale, offset = self.held(parameters)
        scales = {"step": to_half(scale[..., None])}
        if offset is not None:
            scales["low"] = to_half(offset[..., None])
        return scales, Parameters(scale, offset)

    def write(self, codes, settled):
        codes = split_codes(codes, self.block_size, 0)
        return {"blocks": in_rows(self.join_blocks(codes, settled))}

    def encode(self, w, scale=None):
        if scale is not None:
            raise ValueError(f"Blocks of {self} have several scales. Got `scale`.")
        # The last block is padded with its last number, which widens no range.
        missing = -w.shape[-1] % self.block_size
        w = jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, missing)], mode="edge")
        return {"blocks": by_pieces(self._encode_rows, w)}

    def _encode_rows(self, w):
        blocks, _ = split(w, self.block_size)
        packed = self.encode_blocks(blocks)
        # No scale in float16 fits larger numbers, and their powers may be infinite.
        held = all_within(blocks, np.nextafter(np.float32(2.0**40), np.float32(0)))
        return in_rows(self._with_nan(packed, ~held))

    def without_infinities(self, stored):
        blocks = as_blocks(stored["blocks"], self.type_size)
        at = slice(self.scale_at + 1, self.scale_at + 2 * self.halves, 2)
        largest = blocks[..., at] & np.uint8(0x7C) == np.uint8(0x7C)
        largest = jnp.any(largest, axis=-1, keepdims=True)
        return {"blocks": in_rows(self._with_nan(blocks, largest))}

    def _with_nan(self, blocks, where):
        at = np.arange(self.type_size) - self.scale_at
        nan = np.where((at == 0) | (at == 1), 255, 0).astype(np.uint8)
        nan = nan.reshape((1,) * (blocks.ndim - 1) + (self.type_size,))
        return jnp.where(where, blocks | nan, blocks)


def _bits(x: Float[Array, "*b g p"]) -> Integer[Array, "*b _"]:
    return lax.bitcast_convert_type(in_rows(x), jnp.uint32)


def as_blocks(rows: Shaped[Array, "*b _"], size: int) -> Shaped[Array, "*b g t"]:
    *lead, j = rows.shape
    return rows.reshape(*lead, j // size, size)


def in_rows(blocks: Shaped[Array, "*b g t"]) -> Shaped[Array, "*b _"]:
    """The inverse of `as_blocks`."""
    *lead, number, size = blocks.shape
    return blocks.reshape(*lead, number * size)


def split_codes(
    codes: Integer[Array, "*b k"], block_size: int, zero: int
) -> Integer[Array, "*b g s"]:
    """Cuts a row into blocks. The last block is padded with the code of zero."""
    *lead, k = codes.shape
    number = -(-k // block_size)
    padding = [(0, 0)] * len(lead) + [(0, number * block_size - k)]
    codes = jnp.pad(codes, padding, constant_values=zero)
    return codes.reshape(*lead, number, block_size)


def half(bytes: UInt8[Array, "*b 2"]) -> Float[Array, "*b 1"]:
    """Decodes a float16 to float32."""
    bits = lax.bitcast_convert_type(bytes, jnp.float16)
    return bits.astype(jnp.float32)[..., None]


def to_half(x: Float[Array, "*b 1"]) -> UInt8[Array, "*b 2"]:
    """The inverse of `half`."""
    return lax.bitcast_convert_type(x[..., 0].astype(jnp.float16), jnp.uint8)
