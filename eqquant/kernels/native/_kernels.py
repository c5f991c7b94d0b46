import functools as ft

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...formats import (
    AbstractFormat,
    AbstractGrid,
    AbstractRSR,
    Int4,
    Int8,
    NF4,
    Stored,
)
from .._adapted import reads_byte_scales
from .._digits import error, provided
from .._finite import exact_where_not_finite
from .._problem import Problem
from .._table import register_kernel
from ..cpu._codes import grid, scales
from ..cpu._costs import measured
from ..cpu._tiles import refuse_small
from . import _library as library
from ._integer_product import integer_product
from ._weight import are_consecutive, call, multiply, refuse_in_bytes, weight


@reads_byte_scales
def native(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes codes in registers, and multiplies and adds in float32. Codes below 4
    bits instead index tables of partial input sums (the Method of Four Russians), if
    the product is along the blocks."""
    product = "lookup_tables" if problem.product == "matmul" else "transposed"
    return multiply(product, x, weight(stored, problem), problem)


@reads_byte_scales
def native_bfloat16(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Rounds the inputs and the decoded weight to bfloat16, multiplies by the CPU's
    bfloat16 instructions, and accumulates in float32."""
    return multiply("bfloat16_nibbles", x, weight(stored, problem), problem)


@reads_byte_scales
def native_integers(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Multiplies 8-bit integers: the codes by the inputs, each rounded to two 8-bit
    digits. Inputs far above the others of their row are multiplied in float32, as are
    rows with many of those. Activations that are quantized to 8 bits are multiplied as
    they are.

    A unit of the second digit is a 254th of a unit of the first.
    """
    w = weight(stored, problem)
    if problem.activation is None:
        return multiply("int8", x, w, problem)
    assert isinstance(problem.activation, Int8)
    rounded = problem.activation.encode(x.astype(jnp.float32))
    unit = problem.activation.scales(rounded, 0)
    return call("int8", rounded["codes"], w, problem.n, unit).astype(problem.dtype)


@exact_where_not_finite
def native_bytes(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Multiplies 8-bit integers: the codes by the inputs, which are quantized to 8
    bits. Scales are applied to the sums."""
    assert isinstance(problem.activation, Int8)
    rounded = problem.activation.encode(x.astype(jnp.float32))
    y = integer_product(rounded["codes"], stored["codes"], across=True)
    y = y * problem.activation.scales(rounded, 0) * scales(stored, problem)
    return y.astype(problem.dtype)


def _bfloat16(problem: Problem) -> str | None:
    if reason := refuse_in_bytes(problem):
        return reason
    if not library.has("bfloat16_nibbles"):
        return "needs a CPU with bfloat16 products (AVX512_BF16)"
    if grid(problem).offset is not None:
        return f"is for formats without zero-points, got {problem.format}"
    return refuse_small(problem)


def _integers(problem: Problem) -> str | None:
    if reason := refuse_in_bytes(problem):
        return reason
    if not library.has("int8"):
        return "needs a CPU with 8-bit integer products"
    if not are_consecutive(problem.format):
        return f"needs points that are consecutive integers, got {problem.format}"
    activation = problem.activation
    if activation is None:
        return refuse_small(problem)
    if activation.block_size is not None:
        return f"needs activations with one scale for each row, got {activation}"
    return None


def _bytes(problem: Problem) -> str | None:
    if reason := refuse_in_bytes(problem):
        return reason
    if not library.has("int8_matrices"):
        return "needs a CPU with products of 8-bit integers"
    assert problem.activation is not None
    for format in (problem.format, problem.activation):
        if format.block_size is not None:
            return f"needs formats with one scale for each row, got {format}"
    return None


_register = ft.partial(register_kernel, any_length=True)
_register(
    ("matmul", "matmul_transposed"),
    (AbstractGrid, AbstractRSR),
    activation=(None, AbstractFormat),
    supports=refuse_in_bytes,
    seconds=measured("native"),
)(native)
_register(
    "matmul",
    (NF4, Int4),
    activation=(None, AbstractFormat),
    supports=_bfloat16,
    error=8e-3,
    seconds=measured("native_bfloat16"),
)(native_bfloat16)
_of_integers = ft.partial(
    _register,
    "matmul",
    AbstractGrid,
    supports=_integers,
    seconds=measured("native_integers"),
)
_of_integers(error=error, provided=provided)(native_integers)
_of_integers(activation=Int8)(native_integers)
_register(
    "matmul",
    Int8,
    activation=Int8,
    supports=_bytes,
    seconds=measured("native_bytes"),
)(native_bytes)
