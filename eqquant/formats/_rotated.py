import functools as ft
import hashlib
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int8

from ._base import AbstractExact, AbstractFormat
from ._hadamard import hadamard
from ._names import as_format
from ._nf4 import NF4


def _rounding(format: AbstractFormat | str) -> AbstractFormat:
    format = as_format(format)
    if isinstance(format, AbstractExact | Rotated):
        why = "is rotated itself"
        if isinstance(format, AbstractExact):
            why = f"stores {format.domain_text} only"
        raise ValueError(
            "`format` should be one that rounds any number, and that is not rotated. "
            f"Got {format}, which {why}."
        )
    return format


def _integer(name: str) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(
                f"`{name}` should be an integer. Got {value!r}, of type "
                f"{type(value).__name__}."
            )
        return int(value)

    return convert


class Rotated(AbstractFormat):
    """Rotates the contracted axis of a matrix, and stores the result in another format.
    The rotation multiplies numbers by random signs, and blocks of them by an
    orthonormal Hadamard matrix. It spreads outliers over their block, and makes numbers
    nearly normal, so that many of them can share one scale.

    Products rotate the other operand in the same way, and then use the kernels of the
    inner format: `x @ W` is `(x @ R) @ (R.T @ W)`. So `activation` formats round
    rotated inputs, and lose less if a few channels are much larger than the others.
    Under `jax.jit`, products that share an input rotate it once, if their formats have
    the same `block` and `seed`.

    - `format`: the format of the rotated numbers.
    - `block`: the largest size of a block, a power of two. The size is the largest
        power of two, up to `block`, that divides the axis: 64 for an axis of 576.
    - `seed`: the seed of the signs, which are the same in each block.

    The rotation is computed in float32. Rotated inputs are multiplied in float32,
    except that bfloat16 inputs are multiplied in bfloat16 unless `precision="highest"`.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.Rotated(eqquant.Int4(128)))
        q = eqquant.quantize(w, eqquant.Rotated("int8"), activation="int8")
        ```

    Shards of the contracted axis should consist of whole blocks. Within a
    `jax.shard_map`, an axis that `block` does not divide is an error, since a block may
    have been split between shards: pass a `block` that divides the axis there.

    ??? cite "Reference"

        QuIP#: Even Better LLM Quantization with Hadamard Incoherence and Lattice
        Codebooks. Tseng et al., 2024. Section 3.

        QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs. Ashkboos et al., 2024.
    """

    format: AbstractFormat = eqx.field(
        default=NF4(64), static=True, converter=_rounding
    )
    block: int = eqx.field(default=128, static=True, converter=_integer("block"))
    seed: int = eqx.field(default=0, static=True, converter=_integer("seed"))

    def __check_init__(self):
        if not 2 <= self.block <= _largest or self.block & (self.block - 1) != 0:
            raise ValueError(
                f"`block` should be a power of two from 2 to {_largest}. Got "
                f"{self.block}."
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(
                f"`seed` should be at least 0 and below 2**64. Got {self.seed}."
            )

    @property
    def block_size(self) -> int | None:
        return self.format.block_size

    @property
    def bits(self) -> float:
        return self.format.bits

    @property
    def row_axis(self) -> int:
        return self.format.row_axis

    @property
    def splits(self) -> bool:
        return self.format.splits

    @property
    def tile(self) -> int:
        return self.format.tile

    @property
    def rows_together(self) -> int:
        return self.format.rows_together

    def prepacked(self, platform):
        return Rotated(self.format.prepacked(platform), self.block, self.seed)

    def encode(self, w, scale=None):
        return self.format.encode(self.rotate(w), scale)

    def decode(self, stored, tail):
        return self.rotate_back(self.format.decode(stored, tail))

    def with_rows_scaled(self, stored, factors):
        return self.format.with_rows_scaled(stored, factors)

    def shape(self, stored, tail):
        return self.format.shape(stored, tail)

    def size(self, k: int) -> int:
        """Returns the size of the rotated blocks for an axis of size `k`."""
        return math.gcd(k, self.block)

    def rotate(self, x: Inexact[Array, "*b k"]) -> Inexact[Array, "*b k"]:
        """Computes `x @ R`, in float32 or a wider dtype."""
        return self._by_blocks(x, lambda r: r)

    def rotate_back(self, x: Inexact[Array, "*b k"]) -> Inexact[Array, "*b k"]:
        """Computes `x @ R.T`, the inverse of `rotate`."""
        return self._by_blocks(x, lambda r: r.T)

    def rotate_gram(
        self, gram: Inexact[Array, "..."], ndim: int
    ) -> Inexact[Array, "..."]:
        """Computes the Gram matrix `R.T @ gram @ R` of rotated inputs, `*b k k`. From a
        diagonal, `*b k`, it computes the diagonal of this matrix for uncorrelated
        inputs.

        **Arguments:**

        - `ndim`: the number of axes of each Gram: 2, or 1 for a diagonal.
        """
        if ndim == 2:
            return self.rotate(self.rotate(gram).swapaxes(-1, -2))
        # All elements of a block of `R` have the same square.
        *lead, k = gram.shape
        size = self.size(k)
        blocks = gram.astype(jnp.float32).reshape(*lead, k // size, size)
        mean = jnp.mean(blocks, -1, keepdims=True)
        return jnp.broadcast_to(mean, blocks.shape).reshape(*lead, k)

    def _by_blocks(self, x, fn):
        # A product with a small matrix is at least as fast as the fast Hadamard
        # transform, even on CPUs, since each step of the transform goes through memory.
        *lead, k = x.shape
        size = self.size(k)
        if size != self.block and jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                "Within `jax.shard_map`, the contracted axis should have a multiple of "
                f"{self.block} numbers, as {self} rotates so many together. Got {k}. "
                "Pass a smaller `block` when you quantize."
            )
        dtype = x.dtype if x.dtype.itemsize > 4 else jnp.float32
        # XLA folds constants at compile time. Storing bytes keeps the program small.
        r = fn(_signs(size, self.seed)).astype(dtype) / math.sqrt(size)
        blocks = x.astype(dtype).reshape(*lead, k // size, size)
        return jnp.matmul(blocks, r, precision="highest").reshape(*lead, k)


def unrotated(format: AbstractFormat) -> AbstractFormat:
    """Returns the format that stores the numbers of a format, rotated or not."""
    return format.format if isinstance(format, Rotated) else format


# The largest `block`: its matrix is a constant of the program.
_largest = 1024


@ft.cache
def _signs(size: int, seed: int) -> Int8[np.ndarray, "s s"]:
    """Returns the signs of the elements of a block of `R`: a Hadamard matrix in
    Sylvester's order, whose rows are multiplied by random signs."""
    # Files store only the seed, so the signs come from a hash that will never change.
    digest = hashlib.shake_256(seed.to_bytes(8, "little")).digest(-(-size // 8))
    bits = np.unpackbits(np.frombuffer(digest, np.uint8), bitorder="little")[:size]
    return (1 - 2 * bits.astype(np.int8))[:, None] * hadamard(size)
