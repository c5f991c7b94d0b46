import json
import math
from typing import Any

import numpy as np

from ..._array import is_quantized
from ..._axes import as_tuple
from ...formats import AbstractFormat, BnbFP4, NF4
from ._part import dense, Part, Rows


_types = {NF4: "nf4", BnbFP4: "fp4"}
_sizes = tuple(2**i for i in range(5, 13))


def bitsandbytes_parts(name: str, x: Any) -> dict[str, Part]:
    """An array as bitsandbytes has it.

    **Raises:**

    A `ValueError` if bitsandbytes has no such format.
    """
    if not is_quantized(x):
        return dense(name, x)
    flat = as_tuple(x.axis) == tuple(range(-x.ndim, 0))
    rows = Rows(name, x, "bitsandbytes", flat)
    format = rows.format
    kind = _types.get(type(format))
    size = format.block_size or rows.k
    if kind is None or size not in _sizes:
        raise rows.refused(
            "it has `NF4(block_size)` and `BnbFP4(block_size)`, in blocks of powers of "
            "two from 32 to 4096"
        )
    if not flat and rows.k % size != 0:
        raise rows.refused(
            f"its blocks go over the rows, which should have a multiple of {size} "
            f"numbers; the shape is {rows.shape}"
        )
    total = math.prod(rows.shape)
    state = json.dumps(
        {
            "quant_type": kind,
            "blocksize": size,
            "dtype": rows.dtype.name,
            "shape": rows.shape,
        }
    ).encode()

    def codes():
        # The first code is to be in the high bits.
        found = rows.stored("codes").reshape(-1, 1)
        return found >> np.uint8(4) | found << np.uint8(4)

    def absmax():
        found = np.ascontiguousarray(rows.stored("scale")).reshape(-1)
        return found.view(np.dtype(format.scale_dtype)).astype(np.float32)

    def quant_map():
        return np.asarray(format.to_points(np.arange(16, dtype=np.uint8)))

    return {
        name: Part("U8", (-(-total // 2), 1), codes),
        f"{name}.absmax": Part("F32", (-(-total // size),), absmax),
        f"{name}.quant_map": Part("F32", (16,), quant_map),
        f"{name}.quant_state.bitsandbytes__{kind}": Part(
            "U8", (len(state),), lambda: np.frombuffer(state, np.uint8)
        ),
    }


def bitsandbytes_config(formats: dict[str, AbstractFormat]) -> dict[str, Any]:
    """What is to be said of a model with these formats."""
    kinds = sorted({_types[type(format)] for format in formats.values()})
    if not kinds:
        return {}
    return {
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": kinds[0],
            "bnb_4bit_use_double_quant": False,
        }
    }
