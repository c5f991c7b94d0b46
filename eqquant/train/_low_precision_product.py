import functools as ft
from typing import Any

import equinox as eqx
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from .._product import by_types, codes_of
from ..formats import AbstractFormat
from ._contractions import Kind, layer
from ._linear import linear
from ._operand import as_operand, Operand, Rounding
from ._results import result_sharding


class Roundings(eqx.Module):
    """How the products of a layer round.

    - `forward`: the format of the weight and of the inputs.
    - `to_input`, `to_weight`: the rounding of the cotangent in the two products of the
        backward pass: for the gradient of the input, and of the weight.
    """

    forward: AbstractFormat = eqx.field(static=True)
    to_input: Rounding = eqx.field(static=True)
    to_weight: Rounding = eqx.field(static=True)


def product(
    x: Float[Array, "... k"],
    w: Float[Array, "*b n k"],
    packed: Operand | None,
    stack: int,
    roundings: Roundings,
) -> Float[Array, "... n"]:
    """`x @ w.T`, by rounded operands. The derivatives are those of the product of the
    rounded operands, straight through the rounding."""
    if packed is None:
        packed = rounded_weight(w, roundings.forward)
    inputs = as_operand(lax.stop_gradient(x), roundings.forward)
    inputs = checkpoint_name(inputs, "eqquant_inputs")
    return _product(x, w, inputs, packed, stack, roundings)


def rounded_weight(w: Float[Array, "*b n k"], format: AbstractFormat) -> Operand:
    """The weight as products read it. Its name is for policies of `jax.checkpoint`."""
    return checkpoint_name(as_operand(lax.stop_gradient(w), format), "eqquant_weights")


@ft.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _product(x, w, inputs, weight, stack, roundings):
    del w
    fn = lambda a, b: layer(a, b, stack, x.dtype)
    codes = jax.typeof(codes_of(weight.stored))
    typed = result_sharding("along", stack, jax.typeof(x), codes)
    return by_types(fn, typed)(inputs, weight)


@ft.partial(_product.defjvp, symbolic_zeros=True)
def _jvp(stack, roundings, primals, tangents):
    x, w, inputs, weight = primals
    dx, dw, _, _ = tangents
    y = _product(x, w, inputs, weight, stack, roundings)
    factors: list[tuple[Any, Kind, Operand, Rounding]] = [
        (dx, "along", weight, roundings.to_input),
        (dw, "spread", inputs, roundings.to_weight),
    ]
    dy = [
        linear(d, operand, kind=kind, stack=stack, cotangent=rounding, dtype=x.dtype)
        for d, kind, operand, rounding in factors
        if not isinstance(d, SymbolicZero)
    ]
    return y, sum(dy[1:], dy[0])
