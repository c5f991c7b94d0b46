import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from ..._product import by_types, codes_of, vary_together
from ...formats import AbstractFormat, FP8
from ._contractions import layer
from ._delayed import Delayed
from ._dots import Kind, result_sharding
from ._history import bin_of, History
from ._linear import linear
from ._observe import observe
from ._operand import as_operand, format_of, Operand, Rounding


class Roundings(eqx.Module):
    """The roundings in the products of a layer.

    - `forward`: the format of the weight and of the inputs.
    - `to_input`, `to_weight`: the rounding of the cotangent in the two products of the
        backward pass: for the gradient of the input, and of the weight.
    """

    forward: AbstractFormat | Delayed = eqx.field(static=True)
    to_input: Rounding = eqx.field(static=True)
    to_weight: Rounding = eqx.field(static=True)

    @property
    def histories(self) -> tuple[int, int, int]:
        """The numbers of steps for which the largest values count: of the inputs, of
        the weight, and of the cotangent. Zero for current scales."""
        steps = lambda r: r.history if isinstance(r, Delayed) else 0
        forward = steps(self.forward)
        return forward, forward, max(steps(self.to_input), steps(self.to_weight))


def product(
    x: Float[Array, "... k"],
    w: Float[Array, "*b n k"],
    packed: Operand | None,
    stack: int,
    roundings: Roundings,
    history: History | None = None,
) -> Float[Array, "... n"]:
    """Computes `x @ w.T` from rounded operands. The derivatives are those of the
    product of the rounded operands, straight through the rounding. A history has an
    entry for each matrix of the stack, and its gradient is the report of this step."""
    inputs, weight = (lax.stop_gradient(a) for a in (x, w))
    if packed is None:
        packed = rounded_weight(weight, roundings.forward, history)
    scale = _delayed(roundings.forward, history, 0)
    rounded = as_operand(inputs, roundings.forward, scale)
    rounded = checkpoint_name(rounded, "eqquant_inputs")
    bins = None
    if history is not None:
        both = [bin_of(inputs, stack), bin_of(weight, stack)]
        bins = jnp.stack(vary_together(*both), axis=-1)
    return _product(x, w, rounded, packed, history, bins, stack, roundings)


def rounded_weight(
    w: Float[Array, "*b n k"],
    rounding: AbstractFormat | Delayed,
    history: History | None = None,
) -> Operand:
    """Returns the rounded weight for products, named for policies of
    `jax.checkpoint`."""
    scale = _delayed(rounding, history, 1)
    w = lax.stop_gradient(w)
    return checkpoint_name(as_operand(w, rounding, scale), "eqquant_weights")


def _delayed(rounding, history, operand):
    """Returns the delayed scales of one of the three operands, if it has any."""
    if not isinstance(rounding, Delayed):
        return None
    format = format_of(rounding)
    assert history is not None and isinstance(format, FP8)
    return history.scale(operand, format)


@ft.partial(jax.custom_jvp, nondiff_argnums=(6, 7))
def _product(x, w, inputs, weight, history, bins, stack, roundings):
    del w, history, bins
    fn = lambda a, b: layer(a, b, stack, x.dtype)
    codes = jax.typeof(codes_of(weight.stored))
    typed = result_sharding("along", stack, jax.typeof(x), codes)
    return by_types(fn, typed)(inputs, weight)


@ft.partial(_product.defjvp, symbolic_zeros=True)
def _jvp(stack, roundings, primals, tangents):
    x, _, inputs, weight, history, bins = primals
    dx, dw, _, _, dhistory, _ = tangents
    y = _product(*primals, stack, roundings)
    factors: list[tuple[Any, Kind, Operand, Rounding]] = [
        (dx, "along", weight, roundings.to_input),
        (dw, "spread", inputs, roundings.to_weight),
    ]
    dy = [
        linear(
            *(d, operand),
            kind=kind,
            stack=stack,
            cotangent=rounding,
            dtype=x.dtype,
            delayed=_delayed(rounding, history, 2),
        )
        for d, kind, operand, rounding in factors
        if not isinstance(d, SymbolicZero)
    ]
    dy = sum(dy[1:], dy[0]) if dy else jnp.zeros_like(y)
    if history is None or isinstance(dhistory.seen, SymbolicZero):
        return y, dy
    cotangents = roundings.histories[2] > 0
    return y, observe(dy, dhistory.seen, bins, stack=stack, cotangents=cotangents)
