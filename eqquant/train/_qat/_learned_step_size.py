import functools as ft
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from ..._product import Axis, by_types, contracted_last
from ...formats import AbstractFormat, AbstractScaled, Layout, NF4, spread
from .._points import as_rounding, largest, points
from .._straight_through import back, checked_axis, estimate


def learned_step_size(
    w: Shaped[Array, "..."],
    scale: Float[Array, "*b g"],
    format: AbstractFormat | str = NF4(),
    *,
    axis: Axis | None = None,
) -> Float[Array, "..."]:
    """Quantizes with given scales and dequantizes, with derivatives for the scales,
    too: Learned Step Size Quantization (LSQ).

    Write a number as `scale * u`, and its nearest point as `scale * p`. Then the
    derivatives are

    - with respect to the number: one; zero beyond the first or the last point.
    - with respect to the scale: `p - u`; `p` beyond the first or the last point. This
        is divided by `sqrt(count * last)`, in which `count` numbers share a scale and
        `last` is the last point of the grid, so that scales learn about as fast as
        weights.

    !!! Example

        ```python
        scale = eqquant.quantize(w, "int4").scale

        @jax.grad(argnums=(0, 1))
        def gradients(w, scale):
            return loss(eqquant.train.learned_step_size(w, scale, "int4"))
        ```

    **Arguments:**

    - `w`: a floating-point array of rank one at least.
    - `scale`: the scale of each block, with the contracted axis last. (If training
        makes a scale negative, its absolute value is used. A scale of zero, as for a
        block of zeros, stands for the scale that the format chooses for the block,
        until it is trained.)
    - `format`: a format or its name.
    - `axis`: as in [`eqquant.straight_through`][].

    **Returns:**

    An array of the shape and dtype of `w`.

    **Raises:**

    The errors of [`eqquant.straight_through`][] with `clip=True`, and a `ValueError` if
    `scale` does not have one entry for each block.

    ??? cite "Reference"

        Learned Step Size Quantization. Esser et al., 2020. Equations 1 to 3, and
        Section 2.2.
    """
    format = as_rounding(format)
    axis = checked_axis(w, axis)
    _check_scale(w, scale, format, axis)
    return _learned_step_size(w, scale, format, axis)


@ft.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _learned_step_size(w, scale, format, axis):
    fn = lambda w, scale: _rounded(w, scale, format, axis)
    return by_types(fn, jax.typeof(w).sharding)(w, scale)


def _rounded(w, scale, format, axis):
    rows = contracted_last(lax.stop_gradient(w), axis).astype(jnp.float32)
    size = settled_step_size(rows, scale, format)
    stored = format.encode(rows, lax.stop_gradient(size))
    layout = Layout(format).trimmed(stored, rows.shape[-1])
    value = layout.decode(stored)
    grid = points(stored, layout)
    inside = grid.inside(rows)
    unit = grid.unit(rows) - grid.zero
    point = grid.unit(value) - grid.zero
    slope = jnp.where(inside, point - unit, point)
    slope = slope / math.sqrt(rows.size / scale.size * largest(format))
    of_scale = slope * spread(size, format.block_size, rows.shape[-1])
    of_w = jnp.where(back(inside, w, axis), w, lax.stop_gradient(w))
    surrogate = of_w + back(of_scale.astype(w.dtype), w, axis)
    return estimate(back(value.astype(w.dtype), w, axis), surrogate)


@ft.partial(jax.jit, static_argnums=2, inline=True)
def settled_step_size(
    rows: Float[Array, "*r k"], scale: Float[Array, "*b g"], format: AbstractFormat
) -> Float[Array, "*b g"]:
    """Returns the scales that numbers are rounded with: the absolute values of trained
    scales, and the scale that the format chooses where this is zero."""
    # A block of zeros has the scale zero, and would keep it: zero has no derivative.
    chosen = initial_step_size(rows, format, -1).reshape(scale.shape)
    scale = scale.astype(chosen.dtype)
    return jnp.where(scale < 0, -scale, scale) + jnp.where(scale == 0, chosen, 0)


@ft.partial(jax.jit, static_argnums=(1, 2), inline=True)
def initial_step_size(
    w: Float[Array, "..."], format: AbstractFormat, axis: Axis
) -> Float[Array, "*b g"]:
    """Returns the scales that `format.encode` chooses, in float32."""
    rows = contracted_last(w, axis)
    largest(format)  # raises if the format is not a grid
    assert isinstance(format, AbstractScaled)
    stored = format.encode(rows)
    return format.scales(stored, format.shape(stored, 0)[-1] - rows.shape[-1])


def _check_scale(w, scale, format, axis):
    if not eqx.is_array(scale):
        raise TypeError(f"`scale` should be a JAX array. Got {type(scale).__name__}.")
    expected = eqx.filter_eval_shape(initial_step_size, w, format, axis)
    if scale.shape != expected.shape:
        raise ValueError(
            f"`scale` should have shape {expected.shape}: one for each block of "
            f"{format}. Got {scale.shape}."
        )
