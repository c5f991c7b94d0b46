import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from ._base import Stored
from ._blocks import absmax, steady_sum
from ._check import check_integer
from ._scale import (
    from_bits,
    in_units,
    nearest_scale,
    poison,
    scale_dtype_field,
    to_bits,
)
from ._tiled import AbstractTiled
from ._viterbi import (
    Bitshift,
    most_point,
    most_units,
    nearest_paths,
    nearest_paths_with_feedback,
    to_states,
    to_words,
)


class Trellis(AbstractTiled):
    """Trellis codes: each number is decoded from its own code and the codes after it,
    so the numbers of a sequence are chosen together. For normally distributed numbers,
    the error is 2 to 3 dB lower than on the best grid with as many points, and 0.4 to
    1.1 dB above the theoretical limit. Besides the codes, only one scale is stored for
    each row.

    A row is cut into tiles of 256 numbers. The codes of a tile are a cyclic stream of
    bits, which starts at the lowest bit of a 32-bit word. Number `e` is a function of
    the `states` bits from bit `bits * e` on, whose values look like samples of a normal
    distribution. So this format is for weights that are normally distributed, as they
    nearly are after a rotation. Outliers and zeros are not exact. The last tile may be
    short, but consists of whole words, so `k` should be a multiple of 32.

    - `bits`: the number of bits of a code, 1 to 8.
    - `states`: the number of bits that a number depends on, 8 to 16: there are
        `2**states` states. The time to encode is proportional to the number of states:
        on one thread with the native library on an AMD EPYC, a number takes 0.5 to 0.8
        microseconds with 12 of these bits, and 10 to 25 with 16. Decoding does not get
        slower.
    - `code`: the function of the state. `"mul1"` multiplies the state by `0x83DCD12D`,
        sums the four bytes of the result, and subtracts 510.
    - `scale_dtype`: float32, bfloat16 or float16.

    The signal-to-noise ratio in dB for a million normally distributed numbers:

    | bits | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |
    |---|--:|--:|--:|--:|--:|--:|--:|--:|
    | `states=12` | 5.5 | 11.4 | 17.2 | 23.0 | 28.6 | 33.7 | 37.6 | 43.5 |
    | `states=16` | 5.6 | 11.6 | 17.5 | 23.5 | 29.3 | 35.1 | 40.4 | 45.3 |

    Quantizing decoded numbers again may change them.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.Trellis(3, states=12))
        ```

    ??? cite "Reference"

        QTIP: Quantization with Trellises and Incoherence Processing. Tseng et al.,
        2024. (Section 3: computed codes, and where to close a path.)

        `doc/exl3.md` of exllamav3. (The code `"mul1"`.)
    """

    bits: int = eqx.field(default=3, static=True)  # pyright: ignore
    states: int = eqx.field(default=16, static=True)
    code: Literal["mul1"] = eqx.field(default="mul1", static=True)
    scale_dtype: Any = scale_dtype_field(jnp.float16)
    block_size: ClassVar[None] = None
    row_axis: ClassVar[int] = -1
    tile: ClassVar[int] = 256

    def __check_init__(self):
        check_integer("bits", self.bits, 1, 8)
        check_integer("states", self.states, 8, 16)
        if self.code != "mul1":
            raise ValueError(f"`code` should be 'mul1'. Got {self.code!r}.")

    def encode(self, w, scale=None):
        return self.encode_by(self.nearest_codes, w, scale)

    def encode_by(
        self,
        nearest_codes: Callable[[Int[Array, "*b t"]], UInt[Array, "*b w"]],
        w: Float[Array, "*b k"],
        scale: Float[Array, "*b 1"] | None = None,
    ) -> Stored:
        """Encodes like `encode`, with another implementation of `nearest_codes`."""
        w = w.astype(jnp.float32)
        scale = self._fit(w) if scale is None else scale
        scale = poison(scale[..., None], w[..., None, :])[..., 0]
        bits = to_bits(scale, self.scale_dtype)
        scale = from_bits(bits, self.scale_dtype)
        finite = jnp.isfinite(scale) & jnp.isfinite(w)
        units = in_units(jnp.where(finite, w, 0), jnp.where(finite, scale, 0))
        units = jnp.clip(jnp.round(units), -most_units, most_units).astype(jnp.int16)
        missing = -w.shape[-1] % _together
        units = jnp.pad(units, [(0, 0)] * (w.ndim - 1) + [(0, missing)])
        return {"codes": nearest_codes(units), "scale": bits}

    def _fit(self, w):
        largest = absmax(w)
        square = steady_sum(in_units(w, largest) ** 2, -1)
        mean = jnp.sqrt(square / max(1, w.shape[-1])) * largest
        factor = _factors[self.bits - 1] / np.std(self.every_point)
        return nearest_scale(mean * np.float32(factor), self.scale_dtype)

    def fit(self, w):
        scale = poison(self._fit(w)[..., None], w[..., None, :])[..., 0]
        return self.held(scale)

    def held(self, scale):
        scale = nearest_scale(scale, self.scale_dtype)
        return from_bits(to_bits(scale, self.scale_dtype), self.scale_dtype)

    def nearest_tile(self, w, target, scale, feedback, weights):
        return self.nearest_tile_by(
            self.nearest_codes_with_feedback, w, target, scale, feedback, weights
        )

    def nearest_tile_by(
        self,
        nearest_codes: Callable[..., UInt[Array, "n w"]],
        w: Float[Array, "n t"],
        target: Float[Array, "n t"],
        scale: Float[Array, "n 1"],
        feedback: Float[Array, "t t"],
        weights: Float[Array, " t"],
    ) -> UInt[Array, "n w"]:
        """Rounds like `nearest_tile`, with another implementation of
        `nearest_codes_with_feedback`."""
        missing = -w.shape[-1] % _together
        scale = jnp.where(jnp.isfinite(scale), scale, 0)

        def units(x):
            x = in_units(jnp.where(jnp.isfinite(x), x, 0), scale)
            return jnp.pad(x, ((0, 0), (0, missing)))[:, ::-1]

        backwards = jnp.pad(feedback, (0, missing))[::-1, ::-1]
        weights = jnp.pad(weights, (0, missing))[::-1]
        return nearest_codes(units(w), units(target), jnp.triu(backwards, 1), weights)

    @property
    def every_point(self) -> Int[np.ndarray, " s"]:
        """The point of each state: an integer, which the scale multiplies."""
        return _mul1(np.arange(2**self.states, dtype=np.uint32))

    def nearest_codes(self, units: Int[Array, "*b t"]) -> UInt[Array, "*b w"]:
        """Returns the packed codes of rows of integers, in the units of `every_point`.
        `t` should be a multiple of 32."""
        *lead, _ = units.shape

        def of_tiles(tiles):
            *_, number, t = tiles.shape
            # The bits of later codes are above a number's own bits in its state, so the
            # search goes backwards.
            rows = tiles.reshape(math.prod(lead) * number, t)[:, ::-1]
            states = nearest_paths(rows.astype(jnp.int32), self._trellis)[:, ::-1]
            words = to_words(states & np.uint32(2**self.bits - 1), self.bits)
            return words.reshape(*lead, number * t * self.bits // 32)

        found = [
            of_tiles(units[..., at].reshape(*lead, number, size))
            for at, number, size in _tiles(units.shape[-1], self.tile)
        ]
        return jnp.concatenate(found, axis=-1)

    def nearest_codes_with_feedback(
        self,
        w: Float[Array, "n t"],
        target: Float[Array, "n t"],
        feedback: Float[Array, "t t"],
        weights: Float[Array, " t"],
    ) -> UInt[Array, "n w"]:
        """Returns the packed codes of tiles. All arguments are in reverse order and in
        units of the scale, as `nearest_paths_with_feedback` expects them."""
        states = nearest_paths_with_feedback(
            w, target, feedback, weights, self._trellis
        )
        codes = states[:, ::-1] & np.uint32(2**self.bits - 1)
        return to_words(codes, self.bits)

    def points(self, codes):
        return self.to_points(codes[..., None])[..., 0]

    def write(self, codes, scale):
        return {"codes": codes, "scale": to_bits(scale, self.scale_dtype)}

    def with_rows_scaled(self, stored, factors):
        return self.write(stored["codes"], self.held(self.scales(stored, 0) * factors))

    def decode(self, stored, tail):
        points = self.points(stored["codes"])
        points = points[..., : points.shape[-1] - tail]
        return points * self.scales(stored, tail)

    def to_points(self, words: UInt[Array, "*b w n"]) -> Float[Array, "*b t n"]:
        """Decodes packed codes to points, which the scale multiplies. The last axis is
        over rows."""
        *lead, length, n = words.shape

        def of_tiles(tiles):
            following = jnp.roll(tiles, -1, axis=-2)
            points = _mul1(to_states(tiles, following, self.states, self.bits))
            return points.astype(jnp.float32)

        found = [
            of_tiles(words[..., at, :].reshape(*lead, number, size, n))
            for at, number, size in _tiles(length, self.tile * self.bits // 32)
        ]
        found = [a.reshape(*lead, a.shape[-3] * a.shape[-2], n) for a in found]
        return jnp.concatenate(found, axis=-2)

    @property
    def _trellis(self):
        return Bitshift(self.states, self.bits, _mul1)

    def scales(self, stored, tail):
        return from_bits(stored["scale"], self.scale_dtype)

    def shape(self, stored, tail):
        *lead, size = stored["codes"].shape
        return (*lead, size * 32 // self.bits - tail)


# The codes of this many numbers fill a whole number of words.
_together = 32
# For each number of bits, the factor with the least error by which to multiply the
# scale that would match the root mean squares of numbers and points. With more bits,
# more of the largest numbers should be in range.
_factors = (0.88, 1.02, 1.1, 1.14, 1.18, 1.24, 1.34, 1.4)


def _mul1(state):
    hashed, every_other = state * np.uint32(0x83DCD12D), np.uint32(0xFF00FF)
    pairs = (hashed & every_other) + (hashed >> np.uint32(8) & every_other)
    total = (pairs & np.uint32(0xFFFF)) + (pairs >> np.uint32(16))
    return total.astype(np.int32) - most_point


def _tiles(length: int, size: int) -> list[tuple[slice, int, int]]:
    """Returns the tiles of a row in groups of one size: the slice of the group, the
    number of its tiles and their size. The last tile may be short."""
    number, rest = divmod(length, size)
    whole = slice(0, number * size), number, size
    last = slice(number * size, length), 1, rest
    return ([whole] if number > 0 or rest == 0 else []) + ([last] if rest > 0 else [])
