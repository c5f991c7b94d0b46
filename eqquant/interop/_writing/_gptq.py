from typing import Any

import numpy as np

from ..._array import is_quantized
from ...formats import AbstractFormat, Int, Int4
from ._part import dense, kind_of, Part, Rows
from ._stream import as_words, repacked


def gptq_parts(name: str, x: Any) -> dict[str, Part]:
    """An array as GPTQ has it, in version 2 of its layout.

    **Raises:**

    A `ValueError` if GPTQ has no such format.
    """
    if not is_quantized(x):
        return dense(name, x)
    rows = Rows(name, x, "GPTQ")
    format = rows.format
    bits = gptq_bits(format)
    if bits is None:
        raise rows.refused(
            "it has `Int4(block_size)` and `Int(bits, block_size)` of 2, 3, 4 or 8 "
            "bits, with or without zero-points, and scales of float16 or bfloat16 "
            "(`scale_dtype`)"
        )
    if len(rows.shape) != 2:
        raise rows.refused(f"it should be a matrix; the shape is {rows.shape}")
    n, k = rows.shape
    if n * bits % 32 != 0 or k * bits % 32 != 0:
        raise rows.refused(
            f"its codes should fill words of 32 bits, along rows and columns; the "
            f"shape is {rows.shape}"
        )
    groups = rows.groups

    def qweight():
        codes = rows.stored("codes")[:, : k * bits // 8]
        return as_words(codes).swapaxes(0, 1)

    def qzeros():
        if not has_zeros(format):
            return repacked(np.full((groups, n), 2 ** (bits - 1), np.uint8), bits)
        zeros = rows.stored("zero_point").swapaxes(0, 1)
        if zeros.max(initial=0) >= 2**bits:
            raise rows.refused(f"it has zero-points of more than {bits} bits")
        return repacked(np.ascontiguousarray(zeros, np.uint8), bits)

    def g_idx():
        if isinstance(format, Int) and format.ordered:
            return rows.stored("block")[0]
        return np.arange(k, dtype=np.int32) // np.int32(format.block_size or max(k, 1))

    scale = kind_of(name, format.scale_dtype)
    return {
        f"{rows.prefix}qweight": Part("I32", (k * bits // 32, n), qweight),
        f"{rows.prefix}qzeros": Part("I32", (groups, n * bits // 32), qzeros),
        f"{rows.prefix}scales": Part(
            scale, (groups, n), lambda: rows.stored("scale").swapaxes(0, 1)
        ),
        f"{rows.prefix}g_idx": Part("I32", (k,), g_idx),
    }


def gptq_bits(format: AbstractFormat) -> int | None:
    """How many bits a code has. `None` if GPTQ has no such format."""
    if not isinstance(format, Int | Int4) or format.scale_dtype.itemsize != 2:
        return None
    if isinstance(format, Int) and format.offset == "minimum":
        return None
    bits = int(format.bits)
    return bits if bits in (2, 3, 4, 8) else None


def has_zeros(format: AbstractFormat) -> bool:
    """Whether zero-points are stored."""
    if isinstance(format, Int4):
        return not format.symmetric
    return isinstance(format, Int) and format.offset == "zero_point"


def gptq_config(formats: dict[str, AbstractFormat]) -> dict[str, Any]:
    """What is to be said of a model, of which each array has the format that its name
    goes with.

    **Raises:**

    A `ValueError` if it can be said of some of them only.
    """
    if not formats:
        return {}
    first, format = next(iter(formats.items()))
    for name, other in formats.items():
        same = (gptq_bits(other), other.block_size) == (
            gptq_bits(format),
            format.block_size,
        )
        if not same:
            raise ValueError(
                "All arrays for GPTQ should have as many bits and as large blocks. Got "
                f"{format} for {first!r}, and {other} for {name!r}."
            )
    each = list(formats.values())
    return {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": gptq_bits(format),
            "group_size": format.block_size or -1,
            "sym": not any(map(has_zeros, each)),
            "desc_act": any(isinstance(f, Int) and f.ordered for f in each),
            "checkpoint_format": "gptq_v2",
        }
    }
