import functools as ft
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Shaped

from ..._product import by_types, full_spec, stored_spec, vary_together
from ...formats import (
    AbstractFormat,
    encode_held,
    FP8,
    from_bits,
    Int8,
    Layout,
    or_nan,
    reciprocal,
    Stored,
    to_bits,
)
from .._points import points
from .._stochastic import at_random, dither, Stochastic
from .._straight_through import at_random as at_points
from ._delayed import Delayed
from ._history import or_current


# The rounding of an operand of a product: to a format, stochastically or to nearest,
# with current or delayed scales; to a floating-point dtype; or none.
ToFormat: TypeAlias = AbstractFormat | Stochastic | Delayed
Rounding: TypeAlias = ToFormat | np.dtype | None


class Operand(eqx.Module):
    """An operand of a product, rounded to a format. It has the axes of the array, with
    the contracted axis last."""

    stored: Stored
    layout: Layout = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape(self.stored)

    @property
    def narrow(self) -> tuple[Shaped[Array, "*r k"], Float[Array, "..."]]:
        """Returns the 8-bit numbers, and the scale of each row, of a narrow format."""
        format = as_narrow(self.layout.format)
        assert format is not None
        scale = from_bits(self.stored["scale"], format.scale_dtype)[..., 0]
        return _as_numbers(self.stored["codes"], format), scale

    def decode(self) -> Float[Array, "*r k"]:
        """Returns the numbers, in float32."""
        return self.layout.decode(self.stored)


def bare(rounding: ToFormat) -> AbstractFormat | Stochastic:
    return rounding.format if isinstance(rounding, Delayed) else rounding


def format_of(rounding: ToFormat) -> AbstractFormat:
    rounding = bare(rounding)
    return rounding.format if isinstance(rounding, Stochastic) else rounding


def as_narrow(rounding: ToFormat) -> Int8 | FP8 | None:
    """Returns the format, if it is narrow: of 8-bit numbers, with one scale for each
    row, or for the whole matrix."""
    format = format_of(rounding)
    if isinstance(format, Int8 | FP8) and format.block_size is None:
        return format
    return None


def is_same_kind(rounding: ToFormat, operand: Operand) -> bool:
    """Whether an array with this rounding can be multiplied by an operand in 8 bits:
    both are narrow, and both are integers or both floats."""
    a, b = as_narrow(rounding), as_narrow(operand.layout.format)
    return a is not None and b is not None and isinstance(a, FP8) == isinstance(b, FP8)


def as_operand(
    x: Float[Array, "*r k"],
    rounding: ToFormat,
    delayed: Float[Array, "*b"] | None = None,
) -> Operand:
    """Rounds an array, which has its contracted axis last. Numbers that are not finite
    make their row NaN.

    `delayed` are the scales of earlier steps, or zero if there are none yet. Each
    applies to all axes that follow. With these, a number that is not finite becomes NaN
    alone.
    """
    format = format_of(rounding)
    layout = Layout(format).trimmed(format.structs(x.shape), x.shape[-1])
    fn = ft.partial(_encode, rounding=bare(rounding))
    sharding = jax.typeof(x).sharding
    if sharding.mesh.explicit_axes:
        spec = tuple(full_spec(sharding.spec, x.ndim))
        place = lambda a: NamedSharding(
            sharding.mesh, stored_spec(a.shape, spec, Layout(format))
        )
        fn = by_types(fn, jtu.tree_map(place, format.structs(x.shape)))
    return Operand(fn(x) if delayed is None else fn(x, delayed), layout)


# Compiled, so that scales round like those of `quantize`.
@ft.partial(jax.jit, static_argnames="rounding", inline=True)
def _encode(x, delayed=None, *, rounding):
    x = x.astype(jnp.float32)
    format, is_random = as_narrow(rounding), isinstance(rounding, Stochastic)
    if delayed is not None:
        assert format is not None
        wanted = format.structs(x.shape)["scale"]
        scale = _settled(delayed, x, rounding)
        scale = lax.expand_dims(scale, range(scale.ndim, len(wanted.shape)))
        scale = jnp.broadcast_to(scale, wanted.shape)
        codes = _codes(_without_infinities(x), scale, format, is_random)
        return {"codes": codes, "scale": to_bits(scale, format.scale_dtype)}
    stored = encode_held(format_of(rounding), x)
    if not is_random or format is None:
        return stored
    scale = from_bits(stored["scale"], format.scale_dtype)
    return stored | {"codes": _codes(x, scale, format, True)}


def _settled(delayed, x, rounding):
    format = as_narrow(rounding)
    assert isinstance(format, FP8)
    delayed, x = vary_together(delayed, x)
    return or_current(delayed, x, format)


def _without_infinities(x):
    return or_nan(jnp.isfinite(x), x)


def narrow_columns(
    x: Float[Array, "*b r n"],
    rounding: ToFormat,
    delayed: Float[Array, "*b"] | None = None,
) -> tuple[Shaped[Array, "*b r n"], Float[Array, "*b _"]]:
    """Returns the numbers and the scales of `as_operand(x.mT, rounding, delayed)`, but
    with the numbers in the order of `x`. (On a CPU, transposing 8-bit numbers
    afterwards takes less time.)"""
    format = as_narrow(rounding)
    assert format is not None
    x = x.astype(jnp.float32)
    if delayed is not None:
        scale = _settled(delayed, x, rounding)[..., None]
        x = _without_infinities(x)
    else:
        size = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)
        largest = jnp.max(size, axis=-2, initial=0)[..., None]
        bits = encode_held(format, largest)["scale"]
        scale = from_bits(bits, format.scale_dtype)[..., 0]
    random = isinstance(bare(rounding), Stochastic)
    codes = _codes(x, scale[..., None, :], format, random)
    return _as_numbers(codes, format), scale


def _codes(x, scale, format, random):
    if not random:
        return format.to_codes(x, np.ones(()), scale)
    unit = x * reciprocal(scale)
    if isinstance(format, FP8):
        info = jnp.finfo(format.dtype)
        unit = at_random(unit, dither(x), info.nmant, int(info.minexp))
    else:
        unit = at_random(unit, dither(x))
    # Numbers that are points already do not change.
    return format.to_codes(unit, np.ones(()), jnp.float32(1))


def _as_numbers(codes, format):
    if isinstance(format, FP8):
        return lax.bitcast_convert_type(codes, format.dtype)
    return codes


def rounded(
    x: Float[Array, "*r k"],
    rounding: ToFormat,
    delayed: Float[Array, "*b"] | None = None,
) -> Float[Array, "*r k"]:
    """Rounds an array, and returns the numbers in float32."""
    if not isinstance(rounding, Stochastic) or as_narrow(rounding):
        return as_operand(x, rounding, delayed).decode()
    x, operand = x.astype(jnp.float32), as_operand(x, rounding.format)
    return at_points(x, points(operand.stored, operand.layout), dither(x))
