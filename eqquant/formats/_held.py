import dataclasses

import numpy as np
from jaxtyping import Array, Shaped

from ._base import AbstractFormat, AbstractScaled, Stored
from ._nested import Nested
from ._rotated import unrotated
from .gguf._base import AbstractGGUF


def encode_held(format: AbstractFormat, w: Shaped[Array, "*b k"]) -> Stored:
    """Encodes like `format.encode`, but blocks whose numbers overflow the format decode
    to NaN, never to infinities."""
    return as_held(format, format.encode(w))


def as_held(format: AbstractFormat, stored: Stored) -> Stored:
    """Replaces blocks that would decode to infinities by NaN."""
    format = unrotated(format)
    if isinstance(format, AbstractGGUF):
        return format.without_infinities(stored)
    return stored


def not_held_text(format: AbstractFormat) -> str:
    """Returns the part of an error message about why numbers are too large for a
    format, and which formats can store them."""
    if not _is_narrow(format):
        return (
            "Decoded numbers have to fit into float32 and into the dtype of `w`: "
            "divide `w` by a number first."
        )
    if "scale_dtype" in [field.name for field in dataclasses.fields(format)]:
        wider = "`scale_dtype=jnp.float32`, or bfloat16"
    else:
        wider = "another format, such as `Int8(32)`"
    return f"Its scales are in float16, at most 65504: use {wider}."


def _is_narrow(format):
    format = unrotated(format)
    if isinstance(format, Nested):
        return _is_narrow(format.base) or _is_narrow(format.scale)
    if isinstance(format, AbstractGGUF):
        return True
    return isinstance(format, AbstractScaled) and format.scale_dtype == np.float16
