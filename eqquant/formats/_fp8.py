from typing import Any, ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from ._blocks import absmax
from ._check import check_scale
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
    try:
        converted = jnp.dtype(dtype)
    except TypeError as e:
        raise TypeError(f"{wanted} {dtype!r}.") from e
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
    # By arithmetic, since XLA converts one number after another on a CPU. With the
    # exponents of float32, the numbers have the same bits further up, except for
    # subnormal numbers and those that are not finite.
    info = jnp.finfo(dtype)
    wide = bits.astype(jnp.uint32)
    sign, rest = (wide & np.uint32(128)) << np.uint32(24), wide & np.uint32(127)
    one = np.uint32(127 - (1 - int(info.minexp)) << 23)  # The difference of exponents.
    normal = (rest << np.uint32(23 - info.nmant)) + one
    unit = np.float32(2.0 ** (int(info.minexp) - info.nmant))
    subnormal = lax.bitcast_convert_type(rest.astype(jnp.float32) * unit, jnp.uint32)
    found = jnp.where(rest < np.uint32(2**info.nmant), subnormal, normal)
    largest = np.asarray(info.max, dtype).view(np.uint8).astype(np.uint32)
    wild = np.uint32(0x7FC00000)
    if dtype == jnp.float8_e5m2:
        infinite = rest == np.uint32(124)
        wild = jnp.where(infinite, np.uint32(0x7F800000), np.uint32(0x7FC00000))
    found = jnp.where(rest > largest, wild, found)
    return lax.bitcast_convert_type(sign | found, jnp.float32)


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
