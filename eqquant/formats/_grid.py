import abc
from collections.abc import Sequence
from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, Shaped

from ._adjustable import AbstractAdjustable, Parameters
from ._base import Stored
from ._bits import number_of_codes, pack_bits, unpack_bits
from ._blocks import merge, split, spread
from ._candidates import ranges_within, scales_around
from ._packing import pack, per_byte, unpack
from ._scale import from_bits, held, nearest_scale, poison, to_bits


class AbstractGrid(AbstractAdjustable):
    """A format whose numbers are points of a fixed grid, times a scale for each block.
    An `offset` adds a zero-point or a minimum for each block. A subclass defines the
    grid, as a `diffrax` solver defines its tableau.

    Codes are packed as densely as whole bytes allow: eight to a byte on a grid of two
    levels, five on a grid of three, two on a grid of sixteen. They lie in memory with
    the contracted axis first: on a CPU, a product takes the same byte of every row at
    once.

    A kernel reads `stored["codes"]`, `scales` and `offsets` of each of these formats.
    It also gets the codes of an [`eqquant.formats.AbstractComposite`][] whose `base` is
    a grid.

    !!! Example

        ```python
        class Thirds(eqquant.AbstractGrid):
            block_size: int | None = eqx.field(default=64, static=True)
            levels: ClassVar[int] = 4
            scale_dtype: ClassVar[Any] = jnp.dtype("float32")

            def fit(self, blocks, size):
                return jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)

            def to_codes(self, blocks, size, scale):
                unit = blocks / jnp.where(scale == 0, 1, scale)
                return jnp.round((unit + 1) * 1.5).astype(jnp.uint8)

            def to_points(self, codes):
                return codes.astype(jnp.float32) / 1.5 - 1
        ```
    """

    levels: eqx.AbstractClassVar[int]
    row_axis: ClassVar[int] = -1

    @abc.abstractmethod
    def fit(
        self, blocks: Float[Array, "*b g s"], size: Float[np.ndarray, "*_ g 1"]
    ) -> Float[Array, "*b g 1"]:
        """Returns the scale of each block. `size` is the number of values in each
        block. A block with fewer than `s` values is padded with zeros."""

    @abc.abstractmethod
    def to_codes(
        self,
        blocks: Float[Array, "*b g s"],
        size: Float[np.ndarray, "*_ g 1"],
        scale: Float[Array, "*b g 1"],
    ) -> Shaped[Array, "*b g s"]:
        """Returns the code of the grid point that each number is rounded to. With an
        `offset`, codes are integers of any size, as floats: `encode` subtracts the
        minimum from `blocks` before, or adds the zero-point to the codes, and clips
        them."""

    @abc.abstractmethod
    def to_points(self, codes: Integer[Array, "*b k"]) -> Float[Array, "*b k"]:
        """Returns the grid point of each code, in float32."""

    @property
    def offset(self) -> Literal["zero_point", "minimum"] | None:
        """The kind of number that is stored for each block besides its scale, which is
        also its name:

        - None: nothing. A point `p` of a block with the scale `s` stands for `p * s`.
        - `"zero_point"`: an integer `z`. The number is `(p - z) * s`. (This is for
          grids of consecutive integers.)
        - `"minimum"`: the bits of a float `m`, like those of a scale. The number is
          `p * s + m`.
        """
        return None

    def fit_offset(
        self,
        blocks: Float[Array, "*b g s"],
        size: Float[np.ndarray, "*_ g 1"],
        scale: Float[Array, "*b g 1"],
    ) -> Float[Array, "*b g 1"]:
        """Returns the zero-point or the minimum of each block, if there is an
        `offset`."""
        raise NotImplementedError(f"{self} has no offset.")

    def ends(
        self, scale: Float[Array, "*b g 1"], offset: Float[Array, "*b g 1"] | None
    ) -> Sequence[Float[Array, "*b g 1"]]:
        """Returns the extreme numbers that the codes of a block can express, if these
        may be larger than all numbers of the block: a block is NaN if they overflow."""
        return ()

    @property
    def ordered(self) -> bool:
        """Whether `stored["block"]` holds the block of each position. If not, each
        block is a run of positions."""
        return False

    @property
    def radix(self) -> int | None:
        """The base in which the codes of a byte are digits. `None` if codes are a
        stream of bits, in which some codes begin in one byte and end in the next."""
        return self.levels

    @property
    def code_dtype(self) -> np.dtype:
        """The dtype of the bytes that hold codes: `int8` if each is one signed code,
        and otherwise `uint8`."""
        if self.radix is None or per_byte(self.radix) > 1:
            return np.dtype(np.uint8)
        return np.dtype(self.structs((1, 16))["codes"].dtype)

    @property
    def bits(self) -> float:
        return 8 / per_byte(self.radix or self.levels)

    def encode(self, w, scale=None) -> Stored:
        blocks, size = split(w, self.block_size)
        scale = self.fit(blocks, size) if scale is None else scale[..., None]
        bits = to_bits(poison(scale, blocks), self.scale_dtype)
        scale = from_bits(bits, self.scale_dtype)
        offset, stored = None, {}
        if self.offset == "zero_point":
            offset = self.fit_offset(blocks, size, scale)
            stored["zero_point"] = offset[..., 0].astype(jnp.uint8)
        elif self.offset == "minimum":
            low = nearest_scale(self.fit_offset(blocks, size, scale), self.scale_dtype)
            low = to_bits(low, self.scale_dtype)
            stored["minimum"] = low[..., 0]
            offset = from_bits(low, self.scale_dtype)
        codes = self.rounded(blocks, size, Parameters(scale, offset))
        bits = held(bits, self.scale_dtype, self.ends(scale, offset))
        codes = self.pack(merge(codes, w.shape[-1]))
        if self.ordered:
            stored["block"] = _in_order(w.shape, self.block_size)
        return {"codes": codes, "scale": bits[..., 0], **stored}

    def rounded(
        self,
        blocks: Float[Array, "*b g s"],
        size: Float[np.ndarray, "*_ g 1"],
        parameters: Parameters,
    ) -> Integer[Array, "*b g s"]:
        """Returns the codes to which numbers are rounded, with these scales and
        offsets."""
        scale, offset = parameters
        if offset is None:
            return self.to_codes(blocks, size, scale)
        if self.offset == "minimum":
            # Halves, since the difference may overflow.
            codes = self.to_codes(blocks / 2 - offset / 2, size, scale / 2)
        else:
            codes = self.to_codes(blocks, size, scale) + offset
        return jnp.clip(codes, 0, self.levels - 1).astype(jnp.uint8)

    @property
    def grid(self) -> "AbstractGrid":
        return self

    @property
    def mirrored(self) -> bool:
        """Whether the ends of the grid have different distances from zero, so that a
        negative scale may suit a block better."""
        return False

    def candidates(self, blocks, size):
        if self.offset is not None:
            return ranges_within(self, blocks, size)
        return Parameters(scales_around(self, blocks, size), None)

    def held(self, parameters):
        scale, offset = parameters
        scale = from_bits(to_bits(scale, self.scale_dtype), self.scale_dtype)
        if offset is None:
            return Parameters(scale, None)
        if self.offset == "zero_point":
            return Parameters(scale, jnp.clip(jnp.round(offset), 0, self.levels - 1))
        bits = to_bits(nearest_scale(offset, self.scale_dtype), self.scale_dtype)
        return Parameters(scale, from_bits(bits, self.scale_dtype))

    def settled(self, parameters):
        scale, offset = self.held(parameters)
        low = None if offset is None else offset[..., None]
        ends = [end[..., 0] for end in self.ends(scale[..., None], low)]
        bits = held(to_bits(scale, self.scale_dtype), self.scale_dtype, ends)
        stored, scale = {"scale": bits}, from_bits(bits, self.scale_dtype)
        if offset is not None and self.offset == "zero_point":
            stored["zero_point"] = offset.astype(jnp.uint8)
        elif offset is not None:
            stored["minimum"] = to_bits(offset, self.scale_dtype)
        return stored, Parameters(scale, offset)

    def write(self, codes, settled):
        if self.ordered:
            settled = settled | {"block": _in_order(codes.shape, self.block_size)}
        return {"codes": self.pack(codes), **settled}

    def with_rows_scaled(self, stored, factors):
        if stored["scale"].shape[-2] != stored["codes"].shape[-2]:
            return None
        offset = self.offsets(stored)
        if offset is not None and self.offset == "minimum":
            offset = offset * factors
        scale = self.scales(stored, 0) * factors
        settled, _ = self.settled(Parameters(scale, offset))
        return stored | settled

    def decode(self, stored, tail):
        codes = self.unpack(stored["codes"], tail)
        k, offset = codes.shape[-1], self.offsets(stored)
        scale = self.spread(self.scales(stored, tail), stored, k)
        offset = None if offset is None else self.spread(offset, stored, k)
        return self.numbers(self.to_points(codes), scale, offset)

    def numbers(
        self,
        points: Float[Array, "..."],
        scale: Float[Array, "..."],
        offset: Float[Array, "..."] | None,
    ) -> Float[Array, "..."]:
        """Converts points to numbers, in blocks with these scales and offsets. The
        shapes should broadcast."""
        if offset is None:
            return points * scale
        if self.offset == "zero_point":
            return (points - offset) * scale
        return points * scale + offset

    def scales(self, stored, tail):
        return from_bits(stored["scale"], self.scale_dtype)

    def offsets(self, stored: Stored) -> Float[Array, "*b g"] | None:
        """Returns the zero-points or the minima, in float32. `None` without an
        `offset`."""
        if self.offset == "zero_point":
            return stored["zero_point"].astype(jnp.float32)
        if self.offset == "minimum":
            return from_bits(stored["minimum"], self.scale_dtype)
        return None

    def spread(
        self, of_blocks: Float[Array, "*b g"], stored: Stored, k: int
    ) -> Float[Array, "*b _"]:
        """Repeats the value of each block for each of `k` positions."""
        if not self.ordered:
            return spread(of_blocks, self.block_size, k)
        block = jnp.broadcast_to(stored["block"], (*of_blocks.shape[:-1], k))
        return jnp.take_along_axis(of_blocks, block, axis=-1)

    def pack(self, codes: Integer[Array, "*b k"]) -> Integer[Array, "*b j"]:
        """Packs codes into bytes."""
        if self.radix is None:
            return pack_bits(codes, int(self.bits))
        return pack(codes, self.radix)

    def unpack(
        self, packed: Integer[Array, "*b j"], tail: int
    ) -> Integer[Array, "*b k"]:
        """The inverse of `pack`, without the last `tail` codes."""
        if self.radix is None:
            return unpack_bits(packed, int(self.bits), tail)
        return unpack(packed, self.radix, tail)

    def shape(self, stored, tail):
        *lead, j = stored["codes"].shape
        if self.radix is None:
            return (*lead, number_of_codes(j, int(self.bits)) - tail)
        return (*lead, j * per_byte(self.radix) - tail)


def _in_order(shape, block_size):
    *lead, k = shape
    block = np.arange(k, dtype=np.int32) // (block_size or max(1, k))
    lead = (*lead[:-1], 1) if lead else ()
    return jnp.broadcast_to(block, (*lead, k))
