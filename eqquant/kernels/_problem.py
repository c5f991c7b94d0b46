import dataclasses
from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..formats import AbstractFormat, ByteScales, Layout, round_trip, Stored


# "matmul" is `y[m, n] = x[m, k] @ W[n, k].T`: it contracts the axis along which blocks
# lie. "matmul_transposed" is `y[m, k] = x[m, n] @ W[n, k]`: it contracts the other
# axis. Each is the other's derivative with respect to `x`.
Product: TypeAlias = Literal["matmul", "matmul_transposed"]


# The names of the precisions in which JAX multiplies as accurately as in float32.
_highest = (
    "highest",
    "float32",
    "F32_F32_F32",
    "F64_F64_F64",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
)


def is_highest(precision: str | None) -> bool:
    """Whether a precision asks for a product as accurate as one in float32."""
    return precision in _highest


@dataclasses.dataclass(frozen=True)
class Problem:
    """All that is known of a product when a kernel is chosen for it.

    - `product`: `"matmul"` for `x[m, k] @ W[n, k].T`, or `"matmul_transposed"` for
      `x[m, n] @ W[n, k]`. The blocks of `W` lie along `k`.
    - `platform`: the target platform of the compilation: `"cpu"`, `"cuda"`, `"rocm"` or
      `"tpu"`.
    - `layout`: how `W` lies in its stored arrays: its `format`, `tail` and `row_axis`,
      which are also properties of the problem.
    - `activation`: the format that `x` is quantized in, row by row. `None` for a
      weight-only product.
    - `rows`: `m`. `None` if it is not known at compile time.
    - `n`, `k`: the sizes of `W`.
    - `stack`: the number of such products that run side by side, each with its own `W`.
    - `dtype`: the dtype of `x` and of the result.
    - `precision`: the name of a precision, as in `jax.default_matmul_precision`.
    - `portable`: whether the compiled program may run where eqquant is not installed,
        as in an export of `jax.export`.
    - `composite`: whether `W` is stored in a composite format, such as
        [`eqquant.Nested`][]. The problem then has the format's `base`, whose scales are
        computed before the kernel runs.
    - `byte_scales`: how `stored["scale"]` holds scales of one byte each, for a kernel
        that reads them directly. `None` for all others.
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
    composite: bool = False
    byte_scales: ByteScales | None = None

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
        """`W` in float32, or the rows of it that `stored` holds."""
        return self.layout.decode(stored)

    @property
    def terms(self) -> int:
        """The number of terms of each sum."""
        return self.k if self.product == "matmul" else self.n

    @property
    def numbers(self) -> int:
        """The number of elements of the weights."""
        return self.stack * self.n * self.k

    @property
    def empty(self) -> bool:
        """Whether one of the operands has no elements."""
        return self.numbers == 0 or self.rows == 0

    @property
    def highest(self) -> bool:
        """Whether the product should be as accurate as one in float32."""
        return is_highest(self.precision)

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


def rounded_inputs(x: Float[Array, "m _"], problem: Problem) -> Float[Array, "m _"]:
    """Returns inputs in float32, rounded to the format of the problem's activations, if
    there is one."""
    x = x.astype(jnp.float32)
    return x if problem.activation is None else round_trip(x, problem.activation)
