from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._array import quantize
from ..formats import AbstractExact, AbstractFormat, as_format


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
    names = ("int8", "int8:int8", "nf4", "int4", "ternary", "binary", "rsrbinary")
    return [*map(as_quantization, names)]


def all_formats() -> list[Quantization]:
    """Returns `default_formats`, followed by the formats in files that
    [`eqquant.interop.open`][] reads, as their writers configure them."""
    names = (
        *("nested", "bnbfp4"),
        # GPTQ and AWQ.
        *(f"int({bits}, 128, 'zero_point')" for bits in (4, 3, 8)),
        # MLX.
        *(f"int({bits}, 64, 'minimum')" for bits in (4, 8)),
        *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
        *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0"),
        *("q1_0", "q2_0", "iq4_nl", "iq4_xs"),
        *("fp8", "mxfp8", "mxfp4", "nvfp4"),
        "rsrternary",
    )
    return [*default_formats(), *map(as_quantization, names)]


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
