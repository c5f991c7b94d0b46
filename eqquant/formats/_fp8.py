from typing import Any, ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from ._blocks import absmax
from ._check import as_dtype, check_scale
from ._grid import AbstractGrid
from ._rows import of_all_rows
from ._scale import divided, scale_dtype_field


_float8 = {
    "e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "e5m2": jnp.dtype(jnp.float8_e5m2),
}


def as_float8(dtype: Any) -> np.dtype:
    """Converts the argument `dtype` of a format."""
    wanted = "`dtype` should be 'e4m3' (`float8_e4m3fn`) or 'e5m2' (`float8_e5m2`). Got"
    if isinstance(dtype, str) and dtype in _float8:
        return _float8[dtype]
    converted = as_dtype(dtype, wanted)
    if converted not in _float8.values():
        raise ValueError(f"{wanted} {converted.name}.")
    return converted


def largest_float8(dtype: np.dtype) -> float:
    return float(jnp.finfo(dtype).max)


def to_float8(x: Float[Array, "*s"], dtype: np.dtype) -> Integer[Array, "*s"]:
    """Returns the bits of the nearest numbers of the dtype. Numbers above the largest
    one saturate. (A cast alone would make them NaN, or infinite.)"""
    largest = largest_float8(dtype)
    x = jnp.clip(x, -largest, largest).astype(dtype)
    return lax.bitcast_convert_type(x, jnp.uint8)


def from_float8(bits: Integer[Array, "*s"], dtype: np.dtype) -> Float[Array, "*s"]:
    """The inverse of `to_float8`, in float32."""
    # By arithmetic, since XLA converts one number after another on a CPU; by little of
    # it, and without a choice, or XLA writes the results to memory on a Hopper GPU.
    # Further up, the bits are those of a number in float16, up to the bias of the
    # exponent.
    info = jnp.finfo(dtype)
    up, bias = 10 - info.nmant, 1 - int(info.minexp)
    signed = lax.bitcast_convert_type(bits.astype(jnp.uint8), jnp.int8)
    wide = signed.astype(jnp.int16) << np.int16(up)
    wide = wide & np.int16(-(2**15) | 127 << up)
    if dtype == jnp.float8_e4m3fn:
        # NaN has all bits set. One more in the exponent makes it NaN in float16.
        wide = wide | ((wide + np.int16(1 << up)) & np.int16(2**14))
    found = lax.bitcast_convert_type(wide, jnp.float16).astype(jnp.float32)
    return found * np.float32(2.0 ** (15 - bias))


class FP8(AbstractGrid):
    """8-bit floating-point numbers, times the largest absolute value of the block
    divided by the largest such number. Rounds half to even. Stored as their bits.

    - `dtype`: `"e4m3"`, with four bits of exponent and three of mantissa, reaches 448.
      `"e5m2"`, with five and two, reaches 57344.
    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `scale`: `"tensor"` for one scale for the whole matrix, instead of `"channel"`.
    - `scale_dtype`: float32, bfloat16 or float16.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.FP8("e5m2", scale="tensor"))
        ```

    ??? cite "Reference"

        FP8 Formats for Deep Learning. Micikevicius et al., 2022. Section 3.
    """

    dtype: Any = eqx.field(default="e4m3", static=True, converter=as_float8)
    block_size: int | None = eqx.field(default=None, static=True)
    scale: Literal["channel", "tensor"] = eqx.field(default="channel", static=True)
    scale_dtype: Any = scale_dtype_field()
    levels: ClassVar[int] = 256
    code_dtype: ClassVar[Any] = np.dtype(np.uint8)

    def __check_init__(self):
        check_scale(self.scale, self.block_size)

    def fit(self, blocks, size):
        largest = absmax(blocks)
        if self.scale == "tensor" and blocks.ndim > 2:
            # The blocks of a whole matrix are its rows: the axes are `n 1 k`.
            largest = of_all_rows(largest)
            largest = jnp.max(largest, axis=-3, keepdims=True, initial=0)
        return divided(largest, largest_float8(self.dtype))

    def to_codes(self, blocks, size, scale):
        unit = divided(blocks, jnp.where(scale == 0, 1, scale))
        return to_float8(unit, self.dtype)

    def to_points(self, codes):
        return from_float8(codes, self.dtype)
