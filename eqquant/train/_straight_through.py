import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from .._product import (
    as_tuple,
    Axis,
    by_types,
    contracted_back,
    contracted_last,
    normalise_axis,
)
from ..formats import AbstractFormat, encode_held, Layout, NF4
from ._points import as_rounding, Points, points


def straight_through(
    w: Shaped[Array, "..."],
    format: AbstractFormat | str = NF4(),
    *,
    axis: Axis | None = None,
    clip: bool = False,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "..."]:
    """Fake quantization with the straight-through estimator: quantizes and dequantizes
    in the forward pass, and has the derivative of the identity.

    !!! Example

        ```python
        def loss(w, x, y):
            w = eqquant.straight_through(w, eqquant.Ternary())
            return jnp.mean((x @ w - y) ** 2)

        jax.grad(loss)(w, x, y)
        ```

    Activations are fake-quantized by the same function, for example with one scale for
    each token: `straight_through(x, "int8", axis=-1)`.

    **Arguments:**

    - `w`: a floating-point array with at least one axis.
    - `format`: a format or its name.
    - `axis`: the axis, or axes, along which blocks lie, as in [`eqquant.quantize`][].
    - `clip`: whether numbers beyond the first or the last point of their block have
        the derivative zero instead of one.
    - `key`: a random key for stochastic rounding: each number becomes one of its two
        neighbouring points, with the number itself as the mean. (Numbers beyond the
        first or the last point become that point.) The scales are the same as without
        a key. By default, rounds as the format does.

    **Returns:**

    An array of the shape and dtype of `w`. Without a key it equals
    `quantize(w, format, axis=axis).dequantize()` bit for bit. Non-finite numbers make
    their block NaN.

    **Raises:**

    A `TypeError` if `w` is not a floating-point array. A `ValueError` if it is a
    scalar, or if the format does not round; with `clip` or a `key`, if the format is
    not a scale times a grid.

    ??? cite "Reference"

        Estimating or Propagating Gradients Through Stochastic Neurons for Conditional
        Computation. Bengio et al., 2013.

        Binarized Neural Networks. Hubara et al., 2016. Section 1.3. (`clip`.)

        Deep Learning with Limited Numerical Precision. Gupta et al., 2015. Section 3.1.
        (`key`.)
    """
    format = as_rounding(format)
    return _straight_through(w, key, format, checked_axis(w, axis), clip)


# Compiled because `quantize` is: otherwise the scales might round differently.
@ft.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _straight_through(w, key, format, axis, clip):
    fn = lambda w, key: _passed_through(w, key, format, axis, clip)
    return by_types(fn, jax.typeof(w).sharding)(w, key)


def _passed_through(w, key, format, axis, clip):
    rows = contracted_last(lax.stop_gradient(w), axis).astype(jnp.float32)
    stored = encode_held(format, rows)
    layout = Layout(format).trimmed(stored, rows.shape[-1])
    if key is None:
        value = layout.decode(stored)
    else:
        noise = jr.uniform(key, rows.shape, rows.dtype)
        value = at_random(rows, points(stored, layout), noise)
    surrogate = w
    if clip:
        inside = back(points(stored, layout).inside(rows), w, axis)
        surrogate = jnp.where(inside, w, lax.stop_gradient(w))
    return estimate(back(value.astype(w.dtype), w, axis), surrogate)


def checked_axis(w: Array, axis: Axis | None) -> Axis:
    """Returns the axis to quantize along, counted from the end, for a floating-point
    array."""
    if not eqx.is_array(w) or not jnp.issubdtype(w.dtype, jnp.floating):
        got = f"dtype {w.dtype.name}" if eqx.is_array(w) else type(w).__name__
        raise TypeError(f"`w` should be a floating-point JAX array. Got {got}.")
    if w.ndim == 0:
        raise ValueError("`w` should have at least one axis. Got a scalar.")
    return normalise_axis(axis, w.shape)


def back(rows: Array, w: Array, axis: Axis) -> Array:
    """The inverse of `contracted_last`, for an array of the shape of `w`."""
    _, *inner = [w.shape[i] for i in as_tuple(axis)]
    return contracted_back(rows, axis, tuple(inner))


def at_random(rows: Array, points: Points, noise: Array) -> Array:
    """Rounds each number to one of its two neighbouring points, with noise that is
    uniform in `[0, 1)`."""
    grid = jnp.asarray(points.grid)
    unit = points.unit(rows)
    lower = jnp.clip(jnp.searchsorted(grid, unit, side="right") - 1, 0, grid.size - 2)
    below, above = grid[lower], grid[lower + 1]
    rises = noise * (above - below) < unit - below
    value = (jnp.where(rises, above, below) - points.zero) * points.scale
    return jnp.where(jnp.isnan(unit), jnp.nan, value)


@jax.custom_jvp
def estimate(
    value: Float[Array, "*s"], surrogate: Float[Array, "*s"]
) -> Float[Array, "*s"]:
    """Returns `value`, with the derivatives of `surrogate`. The value is exact: the
    common `surrogate + stop_gradient(value - surrogate)` rounds twice."""
    del surrogate
    return value


@estimate.defjvp
def _jvp(primals, tangents):
    value, surrogate = primals
    _, tangent = tangents
    return estimate(value, surrogate), tangent
