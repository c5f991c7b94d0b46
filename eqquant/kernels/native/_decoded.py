import functools as ft
import itertools as it

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...formats import AbstractFormat, AbstractGrid, round_trip, Stored
from ...formats.gguf import AbstractGGUFBlocks
from .._problem import Problem
from .._table import register_kernel
from ..cpu._tiles import refuse_small
from ..cpu._tuning import native_bfloat16_rows
from . import _library as library
from ._blocks import blocks, call, refuse


# Kernels for all formats of blocks: codes of 1 to 8 bits, which are integers or points
# of a table, with any offset, or packed as in GGUF's types.


def native_decoded(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes the weight in registers, a panel of rows at a time, and multiplies and
    adds in float32."""
    forward = problem.product == "matmul"
    name = "decoded" if forward else "decoded_transposed"
    return _product(name, x, stored, problem)


def native_decoded_bfloat16(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Rounds the inputs and the decoded weight to bfloat16, multiplies by the CPU's
    bfloat16 instructions, and accumulates in float32."""
    return _product("decoded_bfloat16", x, stored, problem)


def _product(name, x, stored, problem):
    x = x.astype(jnp.float32)
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    columns = problem.n if problem.product == "matmul" else problem.k
    return call(name, x, blocks(stored, problem), columns).astype(problem.dtype)


def _rounds_to_bfloat16(problem: Problem) -> str | None:
    reason = refuse(problem)
    if reason is not None:
        return reason
    if library.level() < 3:
        return "needs a CPU with bfloat16 instructions (AVX512_BF16)"
    assert problem.rows is not None
    if problem.rows < native_bfloat16_rows:
        return f"is for {native_bfloat16_rows} rows or more, got {problem.rows}"
    return refuse_small(problem)


for _type, _activation in it.product(
    (AbstractGrid, AbstractGGUFBlocks), (None, AbstractFormat)
):
    _register = ft.partial(
        register_kernel, format_type=_type, activation=_activation, supports=refuse
    )
    for _product_ in ("matmul", "matmul_transposed"):
        _register(_product_, priority=8, error=1e-5)(native_decoded)
    _register("matmul", priority=9, error=8e-3, supports=_rounds_to_bfloat16)(
        native_decoded_bfloat16
    )
