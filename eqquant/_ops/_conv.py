import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, Shaped

from .._array import leading_axes, marked, QuantizedArray, take_along


# A filter of at most `_small` numbers is decoded as a whole. A larger one is decoded in
# tiles of at most `_largest` numbers and at most `1 / _tiles` of the filter.
_small = 2**16
_largest = 2**17
_tiles = 32


def qconv(
    x: QuantizedArray | Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    w: QuantizedArray | Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Inexact[Array, "..."]:
    """`jax.lax.conv_general_dilated` with a quantized filter. The filter is decoded a
    few channels at a time; neither the forward nor the backward pass holds the whole
    dense filter.

    !!! Example

        ```python
        w = eqquant.quantize(w, "int8", axis=(1, 2, 3))  # of shape OIHW
        y = eqquant.qconv(x, w, (1, 1), "SAME")
        ```

    **Arguments:**

    - `x`, `w`: the input and the filter. The filter should be quantized along all of
        its axes except the output channels, or along all except the input channels. Any
        other filter is dequantized as a whole, and so is a quantized `x`. `activation`
        formats are ignored.
    - Others: as in `jax.lax.conv_general_dilated`.

    **Returns:**

    The convolution, in the dtype of `x`. (In the dtype of `w`, if `x` is an integer.)

    **Raises:**

    The errors of `jax.lax.conv_general_dilated` if the shapes do not match.
    """
    x = x.dequantize() if isinstance(x, QuantizedArray) else jnp.asarray(x)
    if not isinstance(w, QuantizedArray):
        w = jnp.asarray(w)
    elif not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(w.dtype)
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    params: dict[str, Any] = dict(
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    if isinstance(w, QuantizedArray):
        # Raises if the shapes do not match, of which tiles see parts.
        struct = jax.ShapeDtypeStruct(w.shape, x.dtype)
        jax.eval_shape(ft.partial(lax.conv_general_dilated, **params), x, struct)
        y = conv(x, w, **params)
        if y is not None:
            return y
        w = w.dequantize().astype(x.dtype)
    return lax.conv_general_dilated(x, w, **params)


def conv(
    x: Inexact[Array, "..."],
    q: QuantizedArray,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    preferred_element_type: Any,
    **params: Any,
) -> Inexact[Array, "..."] | None:
    """Computes `lax.conv_general_dilated` from the packed codes. Returns `None` if the
    filter cannot be split into tiles along its output channels or its input
    channels."""
    out_axis, in_axis, *_ = dimension_numbers.rhs_spec
    lead = leading_axes(q)
    if batch_group_count != 1:
        return None
    if out_axis not in lead and (in_axis not in lead or feature_group_count != 1):
        return None
    axis = out_axis if out_axis in lead else in_axis
    static = tuple((name, _hashable(value)) for name, value in params.items())
    # (The dtype is compared alone: within tuples, NumPy's float64 equals None.)
    dtype = preferred_element_type
    return _by_tiles(x, q, dimension_numbers, feature_group_count, axis, static, dtype)


def _tiled(x, q, dimension_numbers, feature_group_count, tiled, params, dtype):
    params = dict(params)
    _, in_axis, *_ = dimension_numbers.rhs_spec

    # Convolves with a tile of the filter. The checkpoint makes the packed codes its
    # residuals, instead of the decoded tile.
    @ft.partial(jax.checkpoint, static_argnums=(3, 4, 5))
    def part(x, q, start, size, axis, groups):
        w = take_along(q, axis, start, size).dequantize().astype(x.dtype)
        return lax.conv_general_dilated(
            x,
            w,
            dimension_numbers=dimension_numbers,
            feature_group_count=groups,
            preferred_element_type=dtype,
            **params,
        )

    features, channels = dimension_numbers.lhs_spec[1], dimension_numbers.out_spec[1]
    per_input = q.shape[in_axis]
    number = q.shape[tiled]
    size, groups = _tile(q, number, feature_group_count)

    def step(start, size, groups=groups):
        if tiled == in_axis:
            cut = lax.dynamic_slice_in_dim(x, start, size, features)
        elif groups == feature_group_count:
            cut = x
        else:
            first = start // (number // feature_group_count) * per_input
            cut = lax.dynamic_slice_in_dim(x, first, groups * per_input, features)
        return part(cut, q, start, size, tiled, groups)

    if size == number:
        return step(0, size)

    def add(y, start, new):
        if tiled == in_axis:
            return y + new.astype(y.dtype)
        return lax.dynamic_update_slice_in_dim(y, new, start, channels)

    first = step(0, size)
    if tiled == in_axis:
        y = first.astype(_accumulator(first.dtype))
    else:
        shape = list(first.shape)
        shape[channels] = number
        y = add(lax.full_like(first, 0, shape=shape), 0, first)
    y = lax.fori_loop(
        1, number // size, lambda i, y: add(y, i * size, step(i * size, size)), y
    )
    if number % size != 0:
        start = number - number % size
        y = add(y, start, step(start, number % size))
    return y.astype(first.dtype)


# Jitted so that eager calls compile once for each shape.
_by_tiles = marked("qconv", _tiled, static_argnums=(2, 3, 4, 5, 6))


def _hashable(value):
    value = value.tolist() if isinstance(value, np.ndarray) else value
    sequence = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(map(_hashable, value)) if sequence else value


def _tile(q, number, groups):
    # The number of channels to decode at a time, and the number of groups they span.
    if q.size <= _small:
        return number, groups
    wanted = max(1, min(_largest, q.size // _tiles) * number // q.size)
    if groups == 1:
        return wanted, 1
    # A tile is several whole groups, or a fraction of one that divides it evenly.
    each = number // groups
    if wanted < each:
        return _divisor(each, wanted), 1
    some = _divisor(groups, wanted // each)
    return some * each, some


def _divisor(number, most):
    return next(i for i in range(most, 0, -1) if number % i == 0)


def _accumulator(dtype):
    return jnp.float32 if dtype.itemsize < 4 else dtype
