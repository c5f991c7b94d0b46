from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._array import quantize
from ..formats import (
    AbstractExact,
    AbstractFormat,
    as_format,
    Binary,
    BnbFP4,
    FP8,
    Int,
    Int4,
    Int8,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    MXFP8,
    Nested,
    NF4,
    NVFP4,
    Q1_0,
    Q2_0,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    RSRBinary,
    RSRTernary,
    Ternary,
    TQ1_0,
    TQ2_0,
)


class Quantization(NamedTuple):
    """The formats of a product: of the weight, and of the rows of `x` if they are
    quantized, too."""

    format: AbstractFormat
    activation: AbstractFormat | None = None

    def __str__(self) -> str:
        if self.activation is None:
            return str(self.format)
        return f"{self.format}, x {self.activation}"


def default_formats() -> list[Quantization]:
    """Returns the formats that are measured by default."""
    return [
        Quantization(Int8()),
        Quantization(Int8(), Int8()),
        Quantization(NF4()),
        Quantization(Int4()),
        Quantization(Ternary()),
        Quantization(Binary()),
        Quantization(RSRBinary()),
    ]


def all_formats() -> list[Quantization]:
    """Returns `default_formats`, followed by the formats in files that
    [`eqquant.interop.open`][] reads, as their writers configure them."""
    of_files = [
        Nested(NF4(64), scale=Int8(256)),
        BnbFP4(),
        Int(4, 128, offset="zero_point"),  # GPTQ and AWQ
        Int(3, 128, offset="zero_point"),
        Int(8, 128, offset="zero_point"),
        Int(4, 64, offset="minimum"),  # MLX
        Int(8, 64, offset="minimum"),
        *(Q2_K(), Q3_K(), Q4_K(), Q5_K(), Q6_K()),
        *(Q4_0(), Q4_1(), Q5_0(), Q5_1(), Q8_0(), TQ1_0(), TQ2_0()),
        *(Q1_0(), Q2_0(), IQ4_NL(), IQ4_XS()),
        *(FP8(), MXFP8(), MXFP4(), NVFP4()),
        RSRTernary(),
    ]
    return default_formats() + [Quantization(format) for format in of_files]


def as_quantization(value: Quantization | AbstractFormat | str) -> Quantization:
    """Converts a format or a name to a `Quantization`: `"nf4"`, or `"int8:int8"` for
    the weight and the rows.

    **Raises:**

    A `ValueError` if there is no format of this name, or if it cannot quantize rows.
    """
    if isinstance(value, Quantization):
        return value
    if not isinstance(value, str):
        return Quantization(as_format(value))
    name, colon, activation = value.partition(":")
    found = Quantization(as_format(name), as_format(activation) if colon else None)
    if isinstance(found.activation, AbstractExact):
        raise ValueError(
            f"Rows cannot be quantized in {found.activation}, which stores "
            f"{found.activation.domain_text} only. Got {value!r}."
        )
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    jax.eval_shape(lambda w: quantize(w, found.format, activation=found.activation), w)
    return found
