import functools as ft

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ...formats import from_bits, Int8, Stored
from .._finite import infinite_as_nan
from .._problem import Problem
from .._table import register_kernel
from ._tuning import bundles


# On a TPU, XLA fuses the conversion of 8-bit codes into the product, and writes no
# array of the weight's size. So with one scale per row, XLA's own product is enough.


def _supports(problem: Problem) -> str | None:
    if problem.format.block_size is not None:
        return f"needs one scale per row, got {problem.format}"
    if problem.dtype.itemsize > 4:
        return f"computes in float32, got {problem.dtype.name}"
    return None


def _dot(x: Float[Array, "m _"], stored: Stored, axis: int) -> Float[Array, "m _"]:
    # (8-bit integers are exact in bfloat16.)
    x, codes = x.astype(jnp.bfloat16), stored["codes"].astype(jnp.bfloat16)
    contract = (((1,), (axis % 2,)), ((), ()))
    return lax.dot_general(x, codes, contract, preferred_element_type=jnp.float32)


def _scales(stored: Stored, problem: Problem) -> Float[Array, "1 n"]:
    assert isinstance(problem.format, Int8)
    return from_bits(stored["scale"], problem.format.scale_dtype).reshape(1, -1)


# XLA reads the codes once, which takes less time than all kernels that decode.
_register = ft.partial(
    register_kernel,
    format_type=Int8,
    platform="tpu",
    supports=_supports,
    error=5e-3,
    seconds=bundles(400),
)


@_register("matmul")
def xla_int8(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Leaves the product of inputs and codes in bfloat16 to XLA, and scales the
    result."""
    y = _dot(x, stored, problem.row_axis + 1)
    scale = infinite_as_nan(_scales(stored, problem))
    return (y * scale).astype(problem.dtype)


@_register("matmul_transposed")
def xla_int8_transposed(
    x: Float[Array, "m n"], stored: Stored, problem: Problem
) -> Float[Array, "m k"]:
    """Scales the inputs, and leaves their product with the codes in bfloat16 to XLA."""
    x = x.astype(jnp.float32) * _scales(stored, problem)
    return _dot(x, stored, problem.row_axis).astype(problem.dtype)
