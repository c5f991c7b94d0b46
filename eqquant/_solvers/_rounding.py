from typing import NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Integer

from ..formats import AbstractAdjustable, Parameters


class Rounding(NamedTuple):
    """Rounds numbers to the grid of a format. Arrays are blocks, `*b g s`, with
    parameters `*b g 1`, or columns, in which the axis `s` comes first."""

    format: AbstractAdjustable

    def codes(
        self, blocks: Float[Array, "*b g s"], parameters: Parameters
    ) -> Integer[Array, "*b g s"]:
        """Returns the codes of the nearest numbers."""
        grid = self.format.grid
        codes = grid.rounded(blocks, self.size(blocks), parameters)
        if codes.dtype == jnp.uint8:
            # `rounded` may go out of range for numbers beyond the ends of the grid.
            codes = jnp.minimum(codes, np.uint8(min(grid.levels - 1, 255)))
        return codes

    def points(self, codes: Integer[Array, "*b g s"]) -> Float[Array, "*b g s"]:
        """Returns the points of codes."""
        return self.format.grid.to_points(codes)

    def numbers(
        self, codes: Integer[Array, "*b g s"], parameters: Parameters
    ) -> Float[Array, "*b g s"]:
        """Decodes codes."""
        return self.format.grid.numbers(self.points(codes), *parameters)

    def nearest(
        self, blocks: Float[Array, "*b g s"], parameters: Parameters
    ) -> Float[Array, "*b g s"]:
        """Returns the nearest numbers."""
        return self.numbers(self.codes(blocks, parameters), parameters)

    def column(
        self, x: Float[Array, "*b g"], parameters: Parameters
    ) -> tuple[Integer[Array, "*b g"], Float[Array, "*b g"]]:
        """Returns the codes of the nearest numbers, and these numbers. `x` has one
        number for each block, or several along axes before those of the parameters."""
        lead = (1,) * (x.ndim - parameters.scale.ndim)
        given = jtu.tree_map(lambda a: a.reshape(*lead, *a.shape, 1), parameters)
        codes = self.codes(x[..., None], given)
        return codes[..., 0], self.numbers(codes, given)[..., 0]

    def candidates(self, blocks: Float[Array, "*b g s"]) -> Parameters:
        """Returns candidate parameters, each `c *b g 1`, rounded to values that can be
        stored."""
        return self.format.held(self.format.candidates(blocks, self.size(blocks)))

    def size(self, blocks):
        # All blocks are full: `in_blocks` pads the last one.
        number, size = blocks.shape[-2:]
        shape = (*(1,) * (blocks.ndim - 2), number, 1)
        return np.full(shape, size, np.float32)


def in_blocks(
    w: Float[Array, "n k"], format: AbstractAdjustable, multiple: int = 1
) -> Float[Array, "n g s"]:
    """Splits rows into the blocks of a format's grid. The last block is padded with its
    last number, which does not change its range. If one block is a whole row, it is
    padded to a multiple of `multiple`."""
    n, k = w.shape
    size = format.grid.block_size or -(-k // multiple) * multiple
    number = -(-k // size)
    w = jnp.pad(w, [(0, 0), (0, number * size - k)], mode="edge")
    return w.reshape(n, number, size)
