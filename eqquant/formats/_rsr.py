from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._base import AbstractExact
from ._check import as_dtype, check_integer


def _as_dtype(dtype: Any) -> np.dtype:
    wanted = "`dtype` should be a floating-point dtype. Got"
    converted = as_dtype(dtype, wanted)
    if not jnp.issubdtype(converted, jnp.floating):
        raise ValueError(f"{wanted} {converted.name}.")
    return converted


class AbstractRSR(AbstractExact):
    """Each `k` numbers along the contracted axis are the digits of one code, the lowest
    digit first. Products across the codes first add up the inputs of rows with the same
    code; products along them look up the contribution of each code.

    ??? cite "Reference"

        An Efficient Matrix Multiplication Algorithm for Accelerating Inference in
        Binary and Ternary Neural Networks. Dehghankar et al., 2025. Sections 3 and 4.
        (The paper keeps the codes as a permutation that sorts them and the places where
        each of them begins. The codes alone are smaller, and equivalent.)
    """

    k: eqx.AbstractVar[int]
    block_size: ClassVar[None] = None
    row_axis: ClassVar[int] = -1

    def __check_init__(self):
        check_integer("k", self.k, 1, 12, ": how many numbers share a code")

    @property
    def levels(self) -> int:
        """The number of digits: the base of the codes."""
        return len(self.domain)

    @property
    def bits(self) -> float:
        return 8 * self._code_dtype.itemsize / self.k

    @property
    def _code_dtype(self) -> np.dtype:
        return np.min_scalar_type(self.levels**self.k - 1)

    def encode(self, w, scale=None):
        if scale is not None:
            raise ValueError(f"There are no scales in {self}. Got `scale`.")
        if w.dtype == bool:
            w = w.astype(jnp.uint8)
        digits = -self.domain[0] + (w > 0).astype(jnp.uint8) - (w < 0).astype(jnp.uint8)
        *lead, size = w.shape
        number = -(-size // self.k)
        # The last code is padded with zeros.
        padding = [(0, 0)] * len(lead) + [(0, number * self.k - size)]
        digits = jnp.pad(digits, padding, constant_values=-self.domain[0])
        digits = digits.reshape(*lead, number, self.k).astype(self._code_dtype)
        weights = np.array([self.levels**i for i in range(self.k)], self._code_dtype)
        weights = weights.reshape((1,) * (len(lead) + 1) + (self.k,))
        return {"codes": jnp.sum(digits * weights, axis=-1, dtype=self._code_dtype)}

    def decode(self, stored, tail):
        codes = stored["codes"].astype(jnp.float32)[..., None]
        *lead, number, _ = codes.shape
        inverse = np.array([self.levels**-i for i in range(self.k + 1)], np.float32)
        inverse = inverse.reshape((1,) * (codes.ndim - 1) + (self.k + 1,))
        # Exact: the float32 error is below half a code, for codes of 20 bits.
        high = jnp.floor((codes + 0.5) * inverse)
        points = high[..., :-1] - self.levels * high[..., 1:] + self.domain[0]
        return points.reshape(*lead, number * self.k)[..., : number * self.k - tail]

    def shape(self, stored, tail):
        *lead, number = stored["codes"].shape
        return (*lead, number * self.k - tail)


class RSRBinary(AbstractRSR):
    """Redundant Segment Reduction of matrices of 0 and 1, which are stored exactly,
    without scales. Each `k` numbers are the digits of one code, base two, in the
    narrowest of 8, 16 and 32 bits.

    - `k`: how many numbers share a code.
    - `dtype`: the dtype that arrays of integers and of booleans decode to.

    Products are exact for integers, as long as sums of their absolute values stay below
    `2**24`.

    !!! Example

        ```python
        q = eqquant.quantize(mask, eqquant.RSRBinary())
        x @ q
        ```

    ??? cite "Reference"

        An Efficient Matrix Multiplication Algorithm for Accelerating Inference in
        Binary and Ternary Neural Networks. Dehghankar et al., 2025.
    """

    k: int = eqx.field(default=8, static=True)
    dtype: Any = eqx.field(default=jnp.float32, static=True, converter=_as_dtype)
    domain: ClassVar[tuple[int, ...]] = (0, 1)


class RSRTernary(AbstractRSR):
    """Redundant Segment Reduction of matrices of -1, 0 and 1, which are stored exactly,
    without scales. Each `k` numbers, with one added, are the digits of one code, base
    three, in the narrowest of 8, 16 and 32 bits.

    - `k`: how many numbers share a code.
    - `dtype`: the dtype that arrays of integers and of booleans decode to.

    Products are exact for integers, as long as sums of their absolute values stay below
    `2**24`.

    !!! Example

        ```python
        q = eqquant.quantize(jnp.sign(w), eqquant.RSRTernary())
        x @ q
        ```

    ??? cite "Reference"

        An Efficient Matrix Multiplication Algorithm for Accelerating Inference in
        Binary and Ternary Neural Networks. Dehghankar et al., 2025.
    """

    k: int = eqx.field(default=5, static=True)
    dtype: Any = eqx.field(default=jnp.float32, static=True, converter=_as_dtype)
    domain: ClassVar[tuple[int, ...]] = (-1, 0, 1)
