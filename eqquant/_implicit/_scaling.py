import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._array import is_quantized, QuantizedArray
from ..formats import (
    AbstractFormat,
    AbstractGrid,
    from_bits,
    Nested,
    to_bits,
    unrotated,
)
from ._table import add_rule


# A multiple of a quantized array has the same codes, and multiples of its scales.
#
# The factor has to be a constant: the bits of a scale have no derivative with respect
# to it.


@add_rule("mul", out_dtype=None)
def _mul(interpreter, eqn, values):
    a, b = values
    q, other = (a, eqn.invars[1]) if is_quantized(a) else (b, eqn.invars[0])
    factor = interpreter.constant(other)
    return NotImplemented if factor is None else _multiple(q, float(factor))


@add_rule("div")
def _div(interpreter, eqn, values):
    a, _ = values
    divisor = interpreter.constant(eqn.invars[1])
    if not is_quantized(a) or divisor is None or float(divisor) == 0:
        return NotImplemented
    return _multiple(a, 1 / float(divisor))


@add_rule("neg")
def _neg(interpreter, eqn, values):
    (q,) = values
    return _multiple(q, -1.0)


def _multiple(q: QuantizedArray, factor: float):
    format = unrotated(q.format)
    base = _base(format)
    if base is None:
        return NotImplemented
    if abs(factor) != 1:
        # Accept powers of two, which are exact, and scales at least as precise as the
        # array's dtype.
        exact = abs(np.frexp(factor)[0]) == 0.5
        if not exact and _eps(base) > _eps(q.dtype):
            return NotImplemented
        # Keep the scales from becoming subnormal or infinite.
        if base == jnp.float16 or not 2.0**-16 <= abs(factor) <= 2.0**16:
            return NotImplemented
    return [dataclasses.replace(q, stored=_scaled(q.stored, format, factor))]


def _base(format: AbstractFormat):
    # Returns the least precise dtype of the scales. `None` if decoded numbers may not
    # be proportional to them.
    if isinstance(format, Nested):
        dtypes = [_base(format.base), _base(format.scale)]
        if None in dtypes:
            return None
        return jnp.float16 if jnp.float16 in dtypes else max(dtypes, key=_eps)
    if isinstance(format, AbstractGrid) and format.offset != "minimum":
        return format.scale_dtype
    return None


def _eps(dtype):
    return jnp.finfo(dtype).eps


def _scaled(stored, format, factor):
    if isinstance(format, Nested):
        return stored | {"scale": _scaled(stored["scale"], format.scale, factor)}
    dtype = format.scale_dtype
    scale = from_bits(stored["scale"], dtype) * np.float32(factor)
    bits = to_bits(scale, dtype)
    # `to_bits` turns an infinite scale into NaN. Here it stays infinite, as in the
    # dense array.
    infinite = lax.bitcast_convert_type(scale.astype(dtype), bits.dtype)
    return stored | {"scale": jnp.where(jnp.isinf(scale), infinite, bits)}
