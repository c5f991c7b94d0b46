import math
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped

from ._base import AbstractScaled
from ._dynamic8 import codebook, Dynamic8
from ._scale import from_bits, or_nan, to_bits


class BnbScale(AbstractScaled):
    """The scales of bitsandbytes's double quantization: their mean over the matrix is
    subtracted, and the rest stored in the 8-bit numbers of [`eqquant.Dynamic8`][]. In
    bitsandbytes, blocks of scales run over all rows as if these were one. Here each row
    stores the scales of all blocks that it overlaps, and its position in the first of
    them.

    - `block_size`: how many of these scales share a scale of their own.

    `Nested(scale=BnbScale())` takes 4.125 bits, and in most cases 96 more for each row.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.Nested(scale=eqquant.formats.BnbScale()))
        ```

    ??? cite "Reference"

        QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023. Section 3.
    """

    block_size: int | None = eqx.field(default=256, static=True)
    bits: ClassVar[float] = 8.0
    scale_dtype: ClassVar[Any] = np.dtype(np.float32)
    splits: ClassVar[bool] = False

    def encode(self, w, scale=None):
        flat = _as_one(w.astype(jnp.float32))
        # The sum of large numbers may be beyond float32.
        largest = jnp.max(jnp.abs(flat), axis=-1, keepdims=True, initial=0)
        down = jnp.where(largest > 2.0**64, np.float32(2.0**-64), np.float32(1))
        total = jnp.sum(flat * down, axis=-1, keepdims=True)
        offset = total / max(1, flat.shape[-1]) / down
        stored = Dynamic8(self.block_size).encode(flat - offset, scale)
        table = to_bits(jnp.asarray(codebook(signed=True)), self.scale_dtype)
        scales = stored["scale"] if w.ndim == 1 else stored["scale"][..., 0, :]
        blocks, start = row_blocks(w.shape, self.block_size, scales.shape[-1])
        lead = [(0, 0)] * (scales.ndim - 1)
        return {
            "codes": stored["codes"].reshape(w.shape),
            "scale": jnp.pad(scales, [*lead, (0, 1)])[..., blocks],
            "start": jnp.broadcast_to(start, (*w.shape[:-1], 1)),
            "codebook": jnp.broadcast_to(table, (*flat.shape[:-1], 256)),
            "offset": to_bits(offset, self.scale_dtype),
        }

    def decode(self, stored, tail):
        codes = stored["codes"]
        column = lax.broadcasted_iota(jnp.int32, codes.shape, codes.ndim - 1)
        block = (stored["start"] + column) // (self.block_size or 2**31 - 1)
        table = from_bits(stored["codebook"], self.scale_dtype)
        product = _take(table, codes) * _take(self.scales(stored, tail), block)
        # Rounded before the sum: XLA would otherwise fuse the two operations.
        product = or_nan(~jnp.isnan(product), product)
        found = product + from_bits(stored["offset"], self.scale_dtype)
        return found[..., : codes.shape[-1] - tail]

    def scales(self, stored, tail):
        return from_bits(stored["scale"], self.scale_dtype)

    def shape(self, stored, tail):
        *lead, k = stored["codes"].shape
        return (*lead, k - tail)


def row_blocks(
    shape: tuple[int, ...], size: int | None, number: int
) -> tuple[Integer[np.ndarray, "*n m"], Integer[np.ndarray, "*n 1"]]:
    """Returns the blocks that each row overlaps, of `number` blocks that run over all
    rows of a matrix, and the position of the row in the first of them. A vector is one
    row. All rows have the same number of blocks, the largest possible; the index
    `number` stands for a missing block."""
    k, n = shape[-1], math.prod(shape[-2:-1])
    size = size or max(1, n * k)
    first = np.arange(n)[:, None] * k
    blocks = first // size + np.arange((k + size - 2) // size + 1)
    blocks = np.where(blocks * size < first + k, blocks, number)
    start = (first % size).astype(np.int32)
    return (blocks, start) if len(shape) > 1 else (blocks[0], start[0])


def _as_one(x: Shaped[Array, "*b k"]) -> Shaped[Array, "*_ nk"]:
    # Concatenates the rows of a matrix. A vector has none.
    if x.ndim == 1:
        return x
    *lead, n, k = x.shape
    return x.reshape(*lead, 1, n * k)


def _take(x: Float[Array, "*_ s"], index: Integer[Array, "*b k"]):
    return jnp.take_along_axis(x, index.astype(jnp.int32), -1, mode="clip")
