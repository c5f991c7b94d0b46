import dataclasses
import functools as ft
import math

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float

from .._array import quantize, quantized, QuantizedArray
from .._product import as_tuple, Axis, normalise_axis
from ..formats import AbstractFormat, AbstractTiled, as_format, as_held, unrotated
from ._gram import damped, diagonal, lower_root
from ._method import AbstractMethod


def solved(
    w: Float[Array, "..."] | Float[np.ndarray, "..."],
    format: AbstractFormat | str,
    method: AbstractMethod | None = None,
    gram: Float[Array | np.ndarray, "..."] | None = None,
    rows: Float[Array | np.ndarray, "..."] | None = None,
    *,
    cross: Float[Array | np.ndarray, "..."] | None = None,
    mix: float = 1.0,
    axis: Axis | None = None,
    activation: AbstractFormat | str | None = None,
) -> QuantizedArray:
    """Quantizes an array like [`eqquant.quantize`][], but rounds by a method. Returns a
    [`eqquant.QuantizedArray`][] with the shape and dtype of `w`. Raises the errors of
    `quantize`, and a `ValueError` if the method does not apply to the format or needs a
    Gram that is not given, or if the Gram does not match the array or is not finite.

    - `w`, `format`, `axis`, `activation`: the arguments of [`eqquant.quantize`][].
    - `method`: a method, or `None` to round to nearest.
    - `gram`, `rows`: the `value` and the `rows` of an [`eqquant.Gram`][]: `*lead k k`
        or the diagonal, `*lead k`, and `*lead`. `lead` has an axis for each axis of `w`
        that is not contracted. Its size must divide the size of that axis: each entry
        belongs to one of as many equal parts.
    - `cross`, `mix`: if `cross` is given, rounds a matrix whose products with the
        inputs of `gram` approximate the products of `w` with other inputs. `mix` is the
        weight of this correction. See `target`.
    """
    if method is None:
        return quantize(w, format, axis=axis, activation=activation)
    format = as_format(format)
    method.check(format)
    shape = np.shape(w)
    if len(shape) > 0:
        contracted = as_tuple(normalise_axis(axis, shape))
        outer = [n for i, n in enumerate(shape, -len(shape)) if i not in contracted]
        k = math.prod(shape[i] for i in contracted)
        _check(gram, rows, outer, k)
    if cross is not None and (gram is None or np.shape(gram) != np.shape(cross)):
        raise ValueError(
            f"`cross` should have the shape of `gram`. Got {np.shape(cross)}, and "
            f"{None if gram is None else np.shape(gram)}."
        )
    operands = jtu.tree_map(jnp.asarray, (gram, rows, cross))
    tiled = isinstance(unrotated(format), AbstractTiled)
    natively = tiled and _is_on_cpu((w, operands))
    encode = _Encode(method, mix, natively)
    run = ft.partial(quantized, axis=axis, activation=activation)
    if natively:
        # A surrounding trace may be compiled for a machine without this library.
        with jax.ensure_compile_time_eval():
            return run(w, format, encode, operands)
    place = _split(w)
    if place is None:
        return run(w, format, encode, operands)
    # Each device solves the whole problem. A column depends on all earlier ones, so
    # devices with shards would have to synchronise at every column. On CPUs with fewer
    # threads than devices, this would deadlock.
    mesh = place.mesh
    assert isinstance(mesh, Mesh)  # of a concrete array
    if jax.sharding.get_abstract_mesh().empty:
        # Intermediate arrays then have no mesh, and only mix with axes of type Auto.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    w, operands = jax.device_put((w, operands), NamedSharding(mesh, PartitionSpec()))
    return run(w, format, encode, operands).with_sharding(place)


def _is_on_cpu(arrays):
    # Whether these are all concrete arrays, each on a single CPU device.
    arrays = jtu.tree_leaves(arrays)
    if any(isinstance(a, Tracer) for a in arrays):
        return False
    with jax.ensure_compile_time_eval():
        places = [jnp.asarray(a).sharding for a in arrays]
    return all(
        isinstance(place, SingleDeviceSharding)
        and next(iter(place.device_set)).platform == "cpu"
        for place in places
    )


def _split(w):
    """Returns the sharding of a concrete array that is split over devices of this
    process, and otherwise `None`."""
    if not isinstance(w, jax.Array) or isinstance(w, Tracer):
        return None
    place = w.sharding
    whole = place.is_fully_replicated or not place.is_fully_addressable
    return place if isinstance(place, NamedSharding) and not whole else None


@dataclasses.dataclass(frozen=True)
class _Encode:
    """Encodes by a method. The leading axes of the Gram match the axes `*b n`."""

    method: AbstractMethod
    mix: float
    natively: bool

    def __call__(self, format, w, gram, rows, cross):
        sums = gram, rows, cross
        if w.ndim == 1:
            # A vector is encoded as a matrix of one row.
            stored = self(format, w[None], *_map(lambda a: a[None], sums))
            return jtu.tree_map(lambda a: a[0], stored)
        *lead, n, k = w.shape
        parts = 1 if rows is None else rows.shape[-1]
        if gram is not None:
            parts = gram.shape[len(lead)]
        sums = _map(lambda a: _whole(a, lead), sums)
        if parts > 1 and _is_shared(format, w):
            # Rows that share a scale are rounded together, with the sum of their Grams.
            sums = _map(lambda a: jnp.sum(a, len(lead), keepdims=True), sums)
            parts = 1
        if parts == 1:
            sums = _map(lambda a: jnp.squeeze(a, len(lead)), sums)
        gram, rows, cross = sums
        split = w if parts == 1 else w.reshape(*lead, parts, n // parts, k)
        if cross is not None and cross.ndim == split.ndim:
            split = target(split, gram, rows, cross, self.mix)
        stored = self.method.solve(split, format, gram, rows, natively=self.natively)
        if parts > 1:
            stored = jtu.tree_map(
                lambda a: a.reshape(*lead, parts * a.shape[-2], a.shape[-1]), stored
            )
        return as_held(format, stored)


_map = jtu.tree_map


def _whole(a, lead):
    # Repeats entries so that each leading axis has the size of `lead`, or size one.
    for i, size in enumerate(lead):
        if a.shape[i] != 1:
            a = jnp.repeat(a, size // a.shape[i], i)
    return a


def _is_shared(format, w):
    stored = jax.eval_shape(format.encode, w)
    return any(a.shape[-2] != w.shape[-2] for a in jtu.tree_leaves(stored))


def _check(gram, rows, outer, k):
    fits = lambda lead: (
        len(lead) == len(outer)
        and all(m > 0 and n % m == 0 for m, n in zip(lead, outer))
    )
    if gram is not None:
        inner = gram.ndim - len(outer)
        if inner not in (1, 2) or gram.shape[len(outer) :] != (k,) * inner:
            inner = 0
        if inner == 0 or not fits(gram.shape[: len(outer)]):
            raise ValueError(
                f"`gram` should have shape {(*outer, k, k)}, or {(*outer, k)} for its "
                "diagonal, where the axes that are not contracted may have any size "
                f"that divides these. Got {gram.shape}."
            )
        if not isinstance(gram, Tracer):
            with jax.ensure_compile_time_eval():
                finite = bool(_is_finite(gram))
            if not finite:
                raise ValueError("`gram` should be finite. Got NaNs or infinities.")
    if rows is not None and (
        not fits(rows.shape)
        or (gram is not None and rows.shape != gram.shape[: len(outer)])
    ):
        raise ValueError(
            "`rows` should have the shape of `gram` without its last axes. Got "
            f"{rows.shape}."
        )


@jax.jit
def _is_finite(gram):
    return jnp.all(jnp.isfinite(gram))


def target(
    w: Float[Array, "*b n k"],
    gram: Float[Array, "*b k k"],
    rows: Float[Array, "*b"] | None,
    cross: Float[Array, "*b k k"],
    mix: float,
) -> Float[Array, "*b n k"]:
    """Interpolates between `w` and the matrix whose products with inputs `y` best
    approximate the products of `w` with inputs `x`.

    - `gram`: the sum of `y^T y` over rows of inputs.
    - `rows`: the number of these rows.
    - `cross`: the sum of `x^T y` over the same rows.
    - `mix`: the weight of the best approximation: zero returns `w`.
    """

    @ft.partial(jnp.vectorize, signature="(n,k),(k,k),(k,k),()->(n,k)")
    def solve(w, gram, cross, rows):
        mean = jnp.mean(diagonal(gram))
        unit = jnp.where(mean > 0, mean, 1)
        factor = lower_root(damped(gram / unit, rows))
        missing = (w @ ((cross - gram) / unit)).T
        half = lax.linalg.triangular_solve(factor, missing, left_side=True, lower=True)
        found = lax.linalg.triangular_solve(
            factor, half, left_side=True, lower=True, transpose_a=True
        )
        return w + mix * found.T

    # With at least as many rows as inputs, `damped` does not increase the damping.
    rows = jnp.float32(gram.shape[-1]) if rows is None else rows
    with jax.default_matmul_precision("highest"):
        return solve(w.astype(jnp.float32), gram, cross, rows)
