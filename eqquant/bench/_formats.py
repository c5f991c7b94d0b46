from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._array import quantize
from ..formats import (
    AbstractExact,
    AbstractFormat,
    as_format,
    Binary,
    Int4,
    Int8,
    NF4,
    RSRBinary,
    Ternary,
)


class Quantization(NamedTuple):
    """How the operands of a product are stored: the weight, and the rows that it is
    multiplied with if they are quantized too."""

    format: AbstractFormat
    activation: AbstractFormat | None = None

    def __str__(self) -> str:
        if self.activation is None:
            return _short(self.format)
        return f"{_short(self.format)}, x {_short(self.activation)}"


def default_formats() -> list[Quantization]:
    """What is measured unless something else is asked for."""
    return [
        Quantization(Int8()),
        Quantization(Int8(), Int8()),
        Quantization(NF4(64)),
        Quantization(Int4(64)),
        Quantization(Ternary()),
        Quantization(Binary()),
        Quantization(RSRBinary(8)),
    ]


def as_quantization(value: Quantization | AbstractFormat | str) -> Quantization:
    """A `Quantization` from itself, from a format, or from names: `"nf4"`, or
    `"int8:int8"` for a weight and the rows.

    **Raises:**

    A `ValueError` if there is no format of such a name, or if rows cannot be quantized
    in it.
    """
    if isinstance(value, Quantization):
        return value
    if not isinstance(value, str):
        return Quantization(as_format(value))
    name, colon, activation = value.partition(":")
    found = Quantization(as_format(name), as_format(activation) if colon else None)
    if isinstance(found.activation, AbstractExact):
        raise ValueError(
            f"Rows of any numbers cannot be quantized in {found.activation}, which "
            f"stores {found.activation.domain_text} only. Got {value!r}."
        )
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    jax.eval_shape(lambda w: quantize(w, found.format, activation=found.activation), w)
    return found


def _short(format: AbstractFormat) -> str:
    text = f"{format}".replace("block_size=", "")
    return text.replace("(None, ", "(").replace("(None)", "()")
