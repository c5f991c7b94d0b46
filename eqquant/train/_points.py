from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..formats import (
    AbstractComposite,
    AbstractExact,
    AbstractFormat,
    AbstractGrid,
    AbstractScaled,
    as_format,
    Layout,
    per_byte,
    reciprocal,
    spread,
    Stored,
)


def as_rounding(format: AbstractFormat | str) -> AbstractFormat:
    """Checks that a format rounds arbitrary numbers."""
    format = as_format(format)
    if isinstance(format, AbstractExact):
        raise ValueError(
            f"`format` should be one that rounds. Got {format}, which stores "
            f"{format.domain_text} only."
        )
    return format


class Points(NamedTuple):
    """The values that each position of a quantized matrix can take:
    `scale * (grid - zero)`."""

    grid: Float[np.ndarray, " p"]
    scale: Float[Array, "*b _"]
    zero: Float[Array, "*b _"]
    slack: float

    def inside(self, w: Float[Array, "*b k"]) -> Bool[Array, "*b k"]:
        """Marks the numbers between the first and the last point, allowing for the
        rounding of the scale."""
        ends = [self.scale * (end - self.zero) for end in self.grid[[0, -1]]]
        wide = [
            end + self.slack * jnp.abs(end) * side for end, side in zip(ends, (-1, 1))
        ]
        return (w >= wide[0]) & (w <= wide[1])

    def unit(self, w: Float[Array, "*b k"]) -> Float[Array, "*b k"]:
        """Returns the numbers in units of the grid."""
        return w * reciprocal(self.scale) + self.zero


def points(rows: Stored, layout: Layout) -> Points:
    """Returns the points that stored arrays, in rows, can represent. Raises a
    `ValueError` if the format is not a scale times a grid."""
    format = layout.format
    grid = _grid(format)
    assert isinstance(format, AbstractScaled)
    k = layout.shape(rows)[-1]
    scale = spread(format.scales(rows, layout.tail), format.block_size, k)
    zero = jnp.zeros((1,) * scale.ndim, jnp.float32)
    if "zero_point" in rows:
        zero = spread(rows["zero_point"].astype(jnp.float32), format.block_size, k)
    # Allows for the rounding of a scale in float32, and in its stored dtype.
    slack = 2 * jnp.finfo(jnp.float32).eps + jnp.finfo(format.scale_dtype).eps / 2
    return Points(grid, scale, zero, float(slack))


def largest(format: AbstractFormat) -> float:
    """Returns the last point of the grid."""
    return float(_grid(format)[-1])


def _grid(format: AbstractFormat) -> np.ndarray:
    if isinstance(format, AbstractComposite):
        return _grid(format.base)
    if (
        not isinstance(format, AbstractGrid)
        or format.offset == "minimum"
        or format.ordered
    ):
        raise ValueError(
            "`format` should be a scale times a grid for clipping, stochastic rounding "
            f"and learned step sizes. Got {format}."
        )
    with jax.ensure_compile_time_eval():
        found = format.to_points(jnp.asarray(_codes(format)))
        # Leaves out codes that are never written, such as the -128 of `Int8`.
        again = format.to_points(_to_codes(format, found[None]))[0]
        return np.unique(np.asarray(found)[np.asarray(again == found)])


def _to_codes(format, blocks):
    size = np.full((1, 1), blocks.shape[-1], np.float32)
    return format.to_codes(blocks, size, jnp.ones((1, 1), jnp.float32))


def _codes(format):
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    dtype = jax.eval_shape(lambda b: _to_codes(format, b), one).dtype
    signed = not jnp.issubdtype(dtype, jnp.unsignedinteger)
    if format.offset is not None or not signed or per_byte(format.levels) > 1:
        return np.arange(format.levels).astype(dtype)
    info = jnp.iinfo(dtype)
    return np.arange(info.min, info.max + 1).astype(dtype)
