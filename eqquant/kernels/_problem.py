import dataclasses
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Array, Float

from ..formats import AbstractFormat, Layout, Stored


# "matmul" is `y[m, n] = x[m, k] @ W[n, k].T`, along the blocks of `W`.
# "matmul_transposed" is `y[m, k] = x[m, n] @ W[n, k]`, across them.
# The derivative of either is the other.
Product: TypeAlias = Literal["matmul", "matmul_transposed"]


# What JAX calls products that are as good as those of float32.
_highest = (
    "highest",
    "float32",
    "F32_F32_F32",
    "F64_F64_F64",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """All that is known of a product when a kernel is chosen for it.

    - `product`: `"matmul"` for `x[m, k] @ W[n, k].T`, or `"matmul_transposed"` for
      `x[m, n] @ W[n, k]`. The blocks of `W` lie along `k`.
    - `platform`: what is compiled for: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
    - `layout`: how `W` lies in its stored arrays: `format`, `tail` and `row_axis`,
      which can also be read off the problem itself.
    - `activation`: the format that `x` is to be quantized in, row by row. `None` if `x`
      is to stay as it is.
    - `rows`: `m`. `None` if it is not known when compiling.
    - `n`, `k`: the size of `W`.
    - `stack`: how many such products run side by side, each with a `W` of its own.
    - `dtype`: that of `x`, and of the result.
    - `precision`: the name of one, as in `jax.default_matmul_precision`.
    - `portable`: whether the compiled program is for other machines, too, as one that
      `jax.export` makes.
    """

    product: Product
    platform: str
    layout: Layout
    activation: AbstractFormat | None
    rows: int | None
    n: int
    k: int
    stack: int
    dtype: np.dtype
    precision: str | None
    portable: bool = False

    @property
    def format(self) -> AbstractFormat:
        return self.layout.format

    @property
    def tail(self) -> int:
        return self.layout.tail

    @property
    def row_axis(self) -> int:
        return self.layout.row_axis

    def decode(self, stored: Stored) -> Float[Array, "n k"]:
        """`W`, or some of its rows if `stored` has no others, in float32."""
        return self.layout.decode(stored)

    @property
    def highest(self) -> bool:
        """Whether the precision of float32 is asked for."""
        return self.precision in _highest

    def __str__(self):
        m = "?" if self.rows is None else self.rows
        x = self.k if self.product == "matmul" else self.n
        dtype = self.dtype.name
        text = (
            f"{self.product} of {dtype}[{m},{x}] with {self.format}[{self.n},{self.k}]"
        )
        if self.stack != 1:
            text += f", {self.stack} times"
        if self.activation is not None:
            text += f", activations in {self.activation}"
        return f"{text}, on {self.platform}"
