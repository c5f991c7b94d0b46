import dataclasses
import functools as ft
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Shaped

from .._product import (
    as_tuple,
    Axis,
    by_types,
    checked_by_row,
    contracted_last,
    normalise_axis,
    stored_spec,
)
from ..formats import (
    AbstractExact,
    AbstractFormat,
    as_format,
    encode_held,
    Layout,
    NF4,
    not_held_text,
    round_trip,
    Stored,
)
from ..kernels import encoder, most_encoded
from ._array import QuantizedArray
from ._stored import settled


def quantize(
    w: Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    format: AbstractFormat | str = NF4(),
    *,
    axis: Axis | None = None,
    activation: AbstractFormat | str | None = None,
    writable: bool = False,
) -> QuantizedArray:
    """Quantizes an array: stores it in fewer bits.

    !!! Example

        ```python
        w = jax.random.normal(key, (4096, 11008))
        q = eqquant.quantize(w, eqquant.NF4())
        x @ q
        ```

    **Arguments:**

    - `w`: a floating-point array with at least one axis. For a format of a few
        integers, such as [`eqquant.RSRBinary`][], also an array of integers or
        booleans; for [`eqquant.Ternary`][] and [`eqquant.Binary`][], of integers.
    - `format`: a format or its name.
    - `axis`: the axis that matrix products contract and that blocks lie along. By
        default -2, for `x @ w`, or -1 for a vector. A tuple of axes counts as one axis,
        as for the filters of a convolution.
    - `activation`: the format in which products quantize the other operand, row by row
        (dynamic activation quantization). Weight-only by default.
    - `writable`: whether [`eqquant.implicit`][] rounds to the format the numbers that a
        function writes into the array, so that a cache stays packed. `axis` should be
        an axis that is always written as a whole, such as the last axis of keys and
        values. NaN or infinity in the written numbers makes their whole block NaN.

    **Returns:**

    A [`eqquant.QuantizedArray`][] with the shape and dtype of `w`. If `w` holds
    integers or booleans, its dtype is the `dtype` of the format, or float32.

    **Raises:**

    A `TypeError` if `w` is not an array of a dtype that the format takes. A
    `ValueError` if `w` has no axes, is not finite, has numbers too large for the scales
    of the format, or numbers that a format of a few integers cannot store.

    If `w` is traced, its numbers are not known yet. Each block with a number that is
    not finite, or too large, becomes NaN, and a format of a few integers raises at run
    time.
    """
    q = quantized(w, format, encode_held, axis=axis, activation=activation)
    return dataclasses.replace(q, writable=True) if writable else q


def quantized(
    w: Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    format: AbstractFormat | str,
    encode: Callable[..., Stored],
    operands: tuple[Array | None, ...] = (),
    *,
    axis: Axis | None = None,
    activation: AbstractFormat | str | None = None,
) -> QuantizedArray:
    """Quantizes like `quantize`, with `encode(format, w, *operands)` in place of
    `format.encode`. Equal functions with equal hashes are compiled once."""
    format = as_format(format)
    if activation is not None:
        activation = as_format(activation, "activation")
        check_activation(activation)
    if isinstance(w, QuantizedArray):
        raise TypeError(f"`w` is quantized already; `dequantize` it first. Got {w}.")
    if not eqx.is_array(w):
        raise TypeError(f"`w` should be a JAX or NumPy array. Got {type(w).__name__}.")
    dtype = jax.dtypes.canonicalize_dtype(_dtype(w, format))
    if w.ndim == 0:
        raise ValueError("`w` should have at least one axis. Got a scalar.")
    axis = normalise_axis(axis, w.shape)
    traced, ordinary = isinstance(w, Tracer), False
    if not traced:
        with jax.ensure_compile_time_eval():
            ordinary = _check_numbers(w, format, axis)
    sharding = None if traced or not isinstance(w, jax.Array) else w.sharding
    w = jnp.asarray(w)
    if traced and isinstance(format, AbstractExact):
        w = _check_when_run(w, format)
    # (XLA would compile some formats for minutes in float64, which all of them round.)
    if w.dtype == jnp.float64 or (
        format.takes_integers and jnp.issubdtype(w.dtype, jnp.integer)
    ):
        w = w.astype(jnp.float32)
    contracted = [w.shape[i] for i in as_tuple(axis)]
    layout = Layout(format).preferred(w.ndim - len(contracted) + 1)
    native = _native(w, format, axis) if ordinary and encode is encode_held else None
    if native is None:
        stored = _encode(w, layout, axis, encode, operands)
    else:
        # (This must not be traced: the program of a surrounding trace may run
        # elsewhere, without this library.)
        with jax.ensure_compile_time_eval():
            stored = _encode_natively(w, layout, axis, native)
    q = QuantizedArray(
        stored=stored,
        layout=layout.trimmed(stored, math.prod(contracted)),
        axis=axis,
        sharding=None,
        activation=activation,
        dtype=dtype,
        inner=tuple(contracted[1:]),
    )
    return q.with_sharding(sharding) if isinstance(sharding, NamedSharding) else q


@ft.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _encode(w, layout, axis, encode, operands):
    def encode_all(w, operands):
        rows = encode(layout.format, contracted_last(w, axis), *operands)
        return layout.from_rows(rows)

    sharding = _out_sharding(w, encode_all, layout, axis, operands)
    return settled(by_types(encode_all, sharding)(w, operands))


@ft.partial(jax.jit, static_argnums=(1, 2, 3))
def _encode_natively(w, layout, axis, encode):
    w = w if axis == -2 else contracted_last(w, axis)
    return layout.from_rows(encode(layout.format, w))


def _native(w, format, axis):
    # Returns a faster function than `encode_held` for ordinary numbers on a CPU, if
    # any.
    if isinstance(w, Tracer) or not isinstance(w.sharding, SingleDeviceSharding):
        return None
    if w.ndim == len(as_tuple(axis)) or next(iter(w.devices())).platform != "cpu":
        return None
    return encoder(format, w.dtype, axis == -2)


def _out_sharding(w, encode, layout, axis, operands):
    sharding = jax.typeof(w).sharding
    if not sharding.mesh.explicit_axes:
        return None
    plain = jax.ShapeDtypeStruct(w.shape, w.dtype)
    shape = jax.eval_shape(lambda w: contracted_last(w, axis), plain).shape
    entries = checked_by_row(sharding, layout.format, shape, axis)
    return jtu.tree_map(
        lambda a: NamedSharding(sharding.mesh, stored_spec(a.shape, entries, layout)),
        jax.eval_shape(encode, plain, operands),
    )


@ft.partial(jax.jit, static_argnums=1)
def _is_outside(w, format):
    return format.is_outside(w)


# NumPy checks up to this many numbers, without compilation.
_few = 2**16


def _number_beyond(w):
    on_host = isinstance(w, np.ndarray) or w.is_fully_addressable
    if w.size <= _few and on_host:
        return np.sum(~(np.abs(np.asarray(w).astype(np.float64)) <= most_encoded))
    return _number_beyond_of_many(w)


@jax.jit
def _number_beyond_of_many(w):
    return jnp.sum(~(jnp.abs(w) <= most_encoded))


@jax.jit
def _number_not_finite(w):
    return jnp.sum(~jnp.isfinite(w)), jnp.max(jnp.abs(w), initial=0)


@ft.partial(jax.jit, static_argnums=(1, 2))
def _number_lost(w, format, axis):
    def lost(w):
        found = round_trip(contracted_last(w, axis), format).astype(w.dtype)
        return jnp.sum(~jnp.isfinite(found))

    mesh = jax.typeof(w).sharding.mesh
    return by_types(lost, NamedSharding(mesh, PartitionSpec()))(w)


def _dtype(w, format):
    if jnp.issubdtype(w.dtype, jnp.floating):
        return w.dtype
    wanted = "a floating-point dtype"
    if isinstance(format, AbstractExact):
        if w.dtype == bool or jnp.issubdtype(w.dtype, jnp.integer):
            return format.dtype
        wanted += ", or one of integers or booleans"
    elif format.takes_integers:
        if jnp.issubdtype(w.dtype, jnp.integer):
            return jnp.float32
        wanted += ", or one of integers"
    raise TypeError(f"`w` should have {wanted}. Got dtype {w.dtype.name}.")


def check_activation(format: AbstractFormat) -> None:
    """Raises a `ValueError` unless products can quantize the other operand in a
    format."""
    if isinstance(format, AbstractExact):
        raise ValueError(
            "`activation` should be a format that rounds any number. Got "
            f"{format}, which stores {format.domain_text} only."
        )
    # Products reshape all rows of `x` into one matrix, so rows must not share a scale.
    rows = jax.ShapeDtypeStruct((2, 16), np.float32)
    stored = jax.eval_shape(format.encode, rows)
    if any(a.shape[0] != 2 for a in jtu.tree_leaves(stored)):
        raise ValueError(
            "`activation` should be a format with separate scales for each row. "
            f"Got {format}, whose scale all rows share. Use a format such as "
            "`MXFP4()` or `Int8()`."
        )


def _check_numbers(w, format, axis):
    # Checks that all numbers are ordinary: every dtype of scales can hold numbers up to
    # `most_encoded`. Only larger numbers make `_number_lost` quantize and decode the
    # array once more, to look for overflow.
    if isinstance(format, AbstractExact):
        _check_domain(w, format)
        return False
    if int(_number_beyond(w)) == 0:
        return True
    number, largest = _number_not_finite(w)
    if number != 0:
        raise ValueError(
            f"`w` should be finite, but {number} of its {w.size} numbers are NaN or "
            "infinite."
        )
    number = int(_number_lost(w, format, axis))
    if number != 0:
        raise ValueError(
            f"`w` has numbers up to {largest:.3g}, which are too large for {format}: "
            f"{number} of its {w.size} would become NaN. {not_held_text(format)}"
        )
    return False


def _check_domain(w, format):
    if isinstance(w, np.ndarray):
        # NumPy compares these: a JAX array would wrap 64-bit integers.
        outside = np.all([w != number for number in format.domain], axis=0)
    else:
        outside = _is_outside(w, format)
    number = int(outside.sum())
    if number != 0:
        example = np.asarray(w)[np.asarray(outside)][0]
        raise ValueError(
            f"{_wanted(format)} Of its {w.size} numbers {number} are others, such as "
            f"{example}. To round those, use a format such as `Binary()` or "
            "`Ternary()`."
        )


def _check_when_run(w, format):
    outside = jnp.any(format.is_outside(w)).astype(jnp.int32)
    shards = tuple(sorted(jax.typeof(w).manual_axis_type.varying))
    outside = lax.psum(outside, shards) if shards else outside
    # Checks a scalar, since `eqx.error_if` gathers its argument on one device.
    ok = eqx.error_if(jnp.asarray(True), outside > 0, _wanted(format))
    return jnp.where(ok, w, jnp.zeros_like(w))


def _wanted(format):
    return f"`w` should hold no numbers but {format.domain_text} for {format}."
