import functools as ft
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, PyTree

from .._array import check_number
from ..formats import AbstractFormat, as_format, encode_held, Int8, Layout, Stored
from ._points import as_rounding


def quantized_psum(
    tree: PyTree,
    axis_name: str | tuple[str, ...],
    format: AbstractFormat | str = Int8(256),
    *,
    error: PyTree = None,
    min_size: int = 1024,
) -> Any:
    """`jax.lax.psum` under `jax.shard_map` with fewer bits between devices.

    Each device rounds its array, and sends every other device the part that this device
    sums in float32. The sums are rounded again and sent to all. So a number is rounded
    twice, whatever the number of devices.

    !!! Example

        ```python
        @jax.shard_map(in_specs=(P(), P("data")), out_specs=P())
        def gradients(model, batch):
            grads = jax.grad(loss)(jax.lax.pcast(model, "data", to="varying"), batch)
            return eqquant.train.quantized_pmean(grads, "data")
        ```

    (Without `pcast`, JAX itself would sum the gradients of values that all devices
    share.)

    **Arguments:**

    - `tree`: a PyTree of floating-point arrays. Other arrays are summed without
        rounding.
    - `axis_name`: the axis, or axes, of the mesh to sum over.
    - `format`: the format to send, or its name. Its blocks lie along the flattened
        array.
    - `error`: error feedback. A PyTree of the structure of `tree`: the rounding errors
        of this device in the last step, which are added before rounding. Initially
        zeros. It differs between devices.
    - `min_size`: arrays with fewer elements are summed without rounding.

    **Returns:**

    The sums, which are the same on all devices; with `error`, a pair of the sums and
    the new error. The derivatives are those of `jax.lax.psum`.

    **Raises:**

    A `ValueError` if the format does not round, or if `error` does not match `tree`.

    ??? cite "Reference"

        ZeRO++: Extremely Efficient Collective Communication for Giant Model Training.
        Wang et al., 2023. Sections 3.1 and 3.3.

        1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs. Seide et al., 2014. (Error feedback.)
    """
    return _reduce(tree, axis_name, format, error, min_size, False)


def quantized_pmean(
    tree: PyTree,
    axis_name: str | tuple[str, ...],
    format: AbstractFormat | str = Int8(256),
    *,
    error: PyTree = None,
    min_size: int = 1024,
) -> Any:
    """The mean over devices: [`eqquant.train.quantized_psum`][], with the same
    arguments, divided by the number of devices."""
    return _reduce(tree, axis_name, format, error, min_size, True)


def quantized_psum_scatter(
    x: Float[Array, "..."],
    axis_name: str | tuple[str, ...],
    format: AbstractFormat | str = Int8(256),
    *,
    scatter_dimension: int = 0,
) -> Float[Array, "..."]:
    """`jax.lax.psum_scatter` with `tiled=True`, with fewer bits between devices: each
    gets one part of the sum. It reduces gradients of sharded weights.

    **Arguments:**

    - `x`: a floating-point array.
    - `axis_name`, `format`: as in [`eqquant.train.quantized_psum`][].
    - `scatter_dimension`: the axis that is split over the devices.

    **Returns:**

    A part of the sum, in the dtype of `x`. A number is rounded once. The derivatives
    are those of `jax.lax.psum_scatter`.

    **Raises:**

    A `ValueError` if the format does not round, or if the axis does not split evenly.
    """
    size = x.shape[scatter_dimension]
    number = lax.axis_size(axis_name)
    if size % number != 0:
        raise ValueError(
            f"`scatter_dimension` should be an axis that splits over {number} devices. "
            f"Got {scatter_dimension}, of size {size}."
        )
    return _scatter(x, axis_name, as_rounding(format), scatter_dimension % x.ndim)


def quantized_all_gather(
    x: Float[Array, "..."],
    axis_name: str | tuple[str, ...],
    format: AbstractFormat | str = Int8(256),
    *,
    axis: int = 0,
    backward: AbstractFormat | str | None = None,
) -> Float[Array, "..."]:
    """`jax.lax.all_gather` with `tiled=True`, with fewer bits between devices. It
    gathers sharded weights before they are used.

    **Arguments:**

    - `x`: a floating-point array: the part of this device.
    - `axis_name`, `format`: as in [`eqquant.train.quantized_psum`][].
    - `axis`: the axis along which the parts are joined.
    - `backward`: the format in which cotangents are summed and scattered, by
        [`eqquant.train.quantized_psum_scatter`][]. By default they are in their own
        dtype. (With a format there are no forward-mode derivatives.)

    **Returns:**

    All parts, after rounding, in the dtype of `x`. The derivatives are those of
    `jax.lax.all_gather`, straight through the rounding.

    **Raises:**

    A `ValueError` if a format does not round.
    """
    format, axis = as_rounding(format), axis % x.ndim
    if backward is None:
        return _gather(x, axis_name, format, axis)
    return _gather_and_scatter(x, axis_name, format, axis, as_rounding(backward))


def _reduce(tree, axis_name, format, error, min_size, mean):
    format = as_rounding(as_format(format))
    check_number("min_size", min_size)
    leaves, treedef = jtu.tree_flatten(tree)
    if error is None:
        errors = [None] * len(leaves)
    elif jtu.tree_structure(error) != treedef:
        raise ValueError(
            f"`error` should have the structure of `tree`, {treedef}. Got "
            f"{jtu.tree_structure(error)}."
        )
    else:
        errors = jtu.tree_leaves(error)
    new = []
    for x, e in zip(leaves, errors, strict=True):
        if e is not None and e.shape != x.shape:
            raise ValueError(
                "`error` should have arrays of the shapes of `tree`. Got "
                f"{e.shape} for {x.shape}."
            )
        new.append(_reduce_one(x, e, axis_name, format, min_size, mean))
    totals = treedef.unflatten([total for total, _ in new])
    if error is None:
        return totals
    return totals, treedef.unflatten([e for _, e in new])


def _reduce_one(x, error, axis_name, format, min_size, mean):
    floating = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
    if not floating or x.size < min_size:
        return (lax.pmean if mean else lax.psum)(x, axis_name), error
    return _all_reduce(x, error, axis_name, format, mean)


@ft.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _all_reduce(x, error, axis_name, format, mean):
    number = lax.axis_size(axis_name)
    flat = x.astype(jnp.float32).reshape(-1)
    if error is not None:
        flat = flat + error.astype(jnp.float32).reshape(-1)
    # One part for each device, of whole blocks.
    size = -(-flat.size // number)
    size = -(-size // (format.block_size or 1)) * (format.block_size or 1)
    parts = jnp.pad(flat, (0, number * size - flat.size)).reshape(number, size)
    sent, total = _summed(parts, axis_name, format)
    total = total / number if mean else total
    rounded = _encode(format, total[None])
    every = [
        lax.all_gather(a[0], axis_name, to="invarying")
        for a in jtu.tree_leaves(rounded)
    ]
    every = jtu.tree_structure(rounded).unflatten(every)
    y = _decode(format, every, size).reshape(-1)[: flat.size]
    if error is not None:
        # The errors of both roundings: the second concerns the part summed here.
        lost = parts - _decode(format, sent, size)
        again = total - _decode(format, rounded, size)[0]
        again = again * number if mean else again
        places = jnp.arange(number, dtype=jnp.int32)
        here = places[:, None] == lax.axis_index(axis_name)
        lost = lost + jnp.where(here, again[None], 0)
        lost = lost.reshape(-1)[: flat.size].reshape(x.shape)
        error = lost.astype(error.dtype)
    return y.reshape(x.shape).astype(x.dtype), error


@_all_reduce.defjvp
def _all_reduce_jvp(axis_name, format, mean, primals, tangents):
    out = _all_reduce(*primals, axis_name, format, mean)
    total = (lax.pmean if mean else lax.psum)(tangents[0], axis_name)
    return out, (total, jtu.tree_map(jnp.zeros_like, out[1]))


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _scatter(x, axis_name, format, axis):
    number = lax.axis_size(axis_name)
    parts = jnp.moveaxis(x, axis, 0)
    shape = (parts.shape[0] // number, *parts.shape[1:])
    parts = parts.astype(jnp.float32).reshape(number, math.prod(shape))
    _, total = _summed(parts, axis_name, format)
    return jnp.moveaxis(total.reshape(shape), 0, axis).astype(x.dtype)


@_scatter.defjvp
def _scatter_jvp(axis_name, format, axis, primals, tangents):
    (dx,) = tangents
    dy = lax.psum_scatter(dx, axis_name, scatter_dimension=axis, tiled=True)
    return _scatter(*primals, axis_name, format, axis), dy


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _gather(x, axis_name, format, axis):
    flat = x.astype(jnp.float32).reshape(1, x.size)
    stored = _encode(format, flat)
    every = jtu.tree_map(lambda a: lax.all_gather(a[0], axis_name), stored)
    parts = _decode(format, every, x.size).reshape(-1, *x.shape).astype(x.dtype)
    return (
        jnp.concatenate(list(parts), axis) if axis else parts.reshape(-1, *x.shape[1:])
    )


@_gather.defjvp
def _gather_jvp(axis_name, format, axis, primals, tangents):
    (dx,) = tangents
    dy = lax.all_gather(dx, axis_name, axis=axis, tiled=True)
    return _gather(*primals, axis_name, format, axis), dy


@ft.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather_and_scatter(x, axis_name, format, axis, backward):
    del backward
    return _gather(x, axis_name, format, axis)


def _forward(x, axis_name, format, axis, backward):
    return _gather_and_scatter(x, axis_name, format, axis, backward), None


def _backward(axis_name, format, axis, backward, residuals, cotangent):
    del format, residuals
    return (_scatter(cotangent, axis_name, backward, axis),)


_gather_and_scatter.defvjp(_forward, _backward)


def _summed(
    parts: Float[Array, "d c"], axis_name: Any, format: AbstractFormat
) -> tuple[Stored, Float[Array, " c"]]:
    """Returns the encoded part for each device, and the sum of the parts received."""
    sent = _encode(format, parts)
    received = jtu.tree_map(lambda a: lax.all_to_all(a, axis_name, 0, 0), sent)
    return sent, jnp.sum(_decode(format, received, parts.shape[1]), axis=0)


def _encode(format: AbstractFormat, parts: Float[Array, "d c"]) -> Stored:
    # Each part is a matrix of one row, so that parts share nothing.
    return encode_held(format, parts[:, None])


def _decode(format: AbstractFormat, stored: Stored, size: int) -> Float[Array, "d c"]:
    return Layout(format).trimmed(stored, size).decode(stored)[:, 0]
