from typing import Any, ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._check import check_choice, check_integer
from ._grid import AbstractGrid
from ._scale import divided, in_units, scale_dtype_field, step


class Int(AbstractGrid):
    """Integers of 2 to 8 bits, as other libraries store them: one stream of bits, with
    the first code in the lowest bits of the first byte. Rounds half to even.

    - `bits`: the number of bits of a code.
    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `offset`: how a code `q` from 0 to `2**bits - 1` decodes, in a block with the
        scale `s`.

        - None: `(q - 2**(bits - 1)) * s`, as in torchao. The largest absolute value of
          the block is `(2**bits - 1) / 2` times the scale, halfway between two codes.
          It is rounded towards zero nine times out of ten. In blocks of 32 normally
          distributed numbers, the mean error is -4 % of the root mean square error; in
          blocks of 64, -2 %.
        - `"zero_point"`: `(q - z) * s`, with an integer `z`. The range of the block,
          widened to include zero, is `2**bits - 1` times the scale. Zero is exact.
        - `"minimum"`: `q * s + m`, with the smallest number `m` of the block, in the
          dtype of the scale. The range is `2**bits - 1` times the scale.

    - `ordered`: whether the block of each position is stored, for all rows together.
      Then a block need not be a run of positions. GPTQ needs this if it quantizes the
      columns in the order of their activations.
    - `scale_dtype`: float32, bfloat16 or float16.

    For weights of your own, [`eqquant.Int4`][] and [`eqquant.Int8`][] are the better
    choice: their symmetric grids have no such bias.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.Int(3, offset="zero_point"))
        ```

    ??? cite "Reference"

        Integer Quantization for Deep Learning Inference: Principles and Empirical
        Evaluation. Wu et al., 2020. Section 3.

        GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
        Transformers. Frantar et al., 2023. Section 3.
    """

    bits: int = eqx.field(default=4, static=True)  # pyright: ignore
    block_size: int | None = eqx.field(default=64, static=True)
    offset: Literal["zero_point", "minimum"] | None = eqx.field(
        default=None, static=True
    )
    ordered: bool = eqx.field(default=False, static=True)
    scale_dtype: Any = scale_dtype_field()
    # (A property, since a type checker would take a method for an argument.)
    levels: ClassVar[Any] = property(lambda self: 2 ** int(self.bits))
    code_dtype: ClassVar[Any] = np.dtype(np.uint8)

    def __check_init__(self):
        check_integer("bits", self.bits, 2, 8)
        check_choice("offset", self.offset, None, "zero_point", "minimum")

    @property
    def splits(self) -> bool:
        return not self.ordered

    @property
    def radix(self) -> int | None:
        return self.levels if 8 % self.bits == 0 else None

    @property
    def mirrored(self) -> bool:
        return self.offset is None

    def fit(self, blocks, size):
        low, high = self._range(blocks, size)
        if self.offset is None:
            return divided(jnp.maximum(high, -low), (self.levels - 1) / 2)
        return step(low, high, self.levels - 1)

    def fit_offset(self, blocks, size, scale):
        low, _ = self._range(blocks, size)
        if self.offset == "minimum":
            return low
        zero = -divided(low, jnp.where(scale == 0, 1, scale))
        return jnp.clip(jnp.round(zero), 0, self.levels - 1)

    def to_codes(self, blocks, size, scale):
        codes = jnp.round(in_units(blocks, scale))
        if self.offset is None:
            codes = codes + self.levels // 2
            codes = jnp.clip(codes, 0, self.levels - 1).astype(jnp.uint8)
        return codes

    def to_points(self, codes):
        zero = self.levels // 2 if self.offset is None else 0
        return codes.astype(jnp.float32) - np.float32(zero)

    def ends(self, scale, offset):
        if self.offset is None:
            return (self.levels // 2 * scale,)
        last = jnp.float32(self.levels - 1)
        ends = [self.numbers(end, scale, offset) for end in (jnp.float32(0), last)]
        return [*ends, last * scale] if self.offset == "minimum" else ends

    def _range(self, blocks, size):
        if self.offset == "minimum":
            # Of the actual numbers of the block, whose range need not include zero.
            missing = np.arange(blocks.shape[-1]) >= np.maximum(size, 1)
            low = jnp.where(missing, jnp.inf, blocks)
            high = jnp.where(missing, -jnp.inf, blocks)
        else:
            low, high = jnp.minimum(blocks, 0), jnp.maximum(blocks, 0)
        low = jnp.min(low, axis=-1, keepdims=True, initial=jnp.inf)
        high = jnp.max(high, axis=-1, keepdims=True, initial=-jnp.inf)
        return low, high
