import functools as ft
from collections.abc import Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Shaped

from .._product import by_types, full_spec, stored_spec
from ..formats import (
    AbstractFormat,
    encode_held,
    FP8,
    from_bits,
    Int8,
    Layout,
    reciprocal,
    Stored,
    to_bits,
)
from ._points import points
from ._stochastic import at_random, dither, Stochastic
from ._straight_through import at_random as at_points


# How an operand of a product is rounded: to a format, at random or to the nearest; to a
# floating-point dtype; or not at all.
Rounding: TypeAlias = AbstractFormat | Stochastic | np.dtype | None


class Operand(eqx.Module):
    """An operand of a product, rounded to a format. Its axes are those of the array,
    with the contracted axis last."""

    stored: Stored
    layout: Layout = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape(self.stored)

    @property
    def narrow(self) -> "tuple[Shaped[Array, '*r k'], Float[Array, '...']] | None":
        """Numbers of 8 bits, and the scale of each row, if this is what is stored.
        Otherwise `None`."""
        format = self.layout.format
        if not is_narrow(format):
            return None
        codes = self.stored["codes"]
        if isinstance(format, FP8):
            codes = lax.bitcast_convert_type(codes, format.dtype)
        return codes, from_bits(self.stored["scale"], format.scale_dtype)[..., 0]

    def decode(self) -> Float[Array, "*r k"]:
        """The numbers, in float32."""
        return self.layout.decode(self.stored)


def is_narrow(format: AbstractFormat) -> bool:
    """Whether a format is one of 8-bit numbers with one scale for each row, or for the
    whole matrix."""
    return isinstance(format, Int8 | FP8) and format.block_size is None


def same_kind(a: AbstractFormat, b: AbstractFormat) -> bool:
    """Whether two formats are narrow, and both of integers or both of floats."""
    kinds = isinstance(a, FP8) == isinstance(b, FP8)
    return is_narrow(a) and is_narrow(b) and kinds


def as_operand(
    x: Float[Array, "*r k"], rounding: AbstractFormat | Stochastic
) -> Operand:
    """Rounds an array, which has its contracted axis last. Numbers that are not finite
    make their row NaN."""
    format = rounding.format if isinstance(rounding, Stochastic) else rounding
    layout = Layout(format).trimmed(format.structs(x.shape), x.shape[-1])
    fn = ft.partial(_encode, rounding=rounding)
    sharding = jax.typeof(x).sharding
    if sharding.mesh.explicit_axes:
        spec = tuple(full_spec(sharding.spec, x.ndim))
        place = lambda a: NamedSharding(
            sharding.mesh, stored_spec(a.shape, spec, Layout(format))
        )
        fn = by_types(fn, jtu.tree_map(place, format.structs(x.shape)))
    return Operand(fn(x), layout)


# Compiled, so that scales round as those of `quantize`.
@ft.partial(jax.jit, static_argnames="rounding", inline=True)
def _encode(x, rounding):
    x = x.astype(jnp.float32)
    if not isinstance(rounding, Stochastic):
        return encode_held(rounding, x)
    format = rounding.format
    stored = format.encode(x)
    assert is_narrow(format)
    scale = from_bits(stored["scale"], format.scale_dtype)
    unit = x * reciprocal(scale)
    if isinstance(format, FP8):
        info = jnp.finfo(format.dtype)
        rounded = at_random(unit, dither(x), info.nmant, int(info.minexp))
    else:
        rounded = at_random(unit, dither(x))
    # What is a point already stays it.
    codes = format.to_codes(rounded, np.ones(()), jnp.ones(()))
    return stored | {"codes": format.pack(codes)}


def rounded(
    x: Float[Array, "*r k"], rounding: AbstractFormat | Stochastic
) -> Float[Array, "*r k"]:
    """The numbers that an array becomes, in float32."""
    random = isinstance(rounding, Stochastic)
    if not random or is_narrow(rounding.format):
        return as_operand(x, rounding).decode()
    x, operand = x.astype(jnp.float32), as_operand(x, rounding.format)
    return at_points(x, points(operand.stored, operand.layout), dither(x))
