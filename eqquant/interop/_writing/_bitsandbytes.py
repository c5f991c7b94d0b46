import json
import math
from typing import Any

import numpy as np

from ..._array import is_quantized
from ..._product import as_tuple
from ...formats import AbstractFormat, BnbFP4, BnbScale, Nested, NF4, row_blocks
from ._part import dense, Part, Rows


_types = {NF4: "nf4", BnbFP4: "fp4"}
_sizes = tuple(2**i for i in range(5, 13))
# Of what is said of an array whose scales are quantized too: their mean, of which it is
# not known before how many digits it has.
_longest_offset = 24


def bitsandbytes_parts(name: str, x: Any) -> dict[str, Part]:
    """An array as bitsandbytes has it.

    **Raises:**

    A `ValueError` if bitsandbytes has no such format.
    """
    if not is_quantized(x):
        return dense(name, x)
    flat = as_tuple(x.axis) == tuple(range(-x.ndim, 0))
    rows = Rows(name, x, "bitsandbytes", flat)
    nested = rows.format if isinstance(rows.format, Nested) else None
    format: Any = rows.format if nested is None else nested.base
    kind = _types.get(type(format))
    size = format.block_size or rows.k
    sizes = {size} if nested is None else {size, nested.scale.block_size}
    is_known = nested is None or isinstance(nested.scale, BnbScale)
    if kind is None or not sizes <= {*_sizes} or not is_known:
        raise rows.refused(
            "it has `NF4(block_size)`, `BnbFP4(block_size)` and `Nested` of these with "
            "`BnbScale(block_size)`, in blocks of powers of two from 32 to 4096"
        )
    if not flat and rows.k % size != 0:
        raise rows.refused(
            f"its blocks go over the rows, which should have a multiple of {size} "
            f"numbers; the shape is {rows.shape}"
        )
    if nested is not None and not flat and len(rows.shape) > 2:
        raise rows.refused(f"its scales are of one matrix; the shape is {rows.shape}")
    total = math.prod(rows.shape)
    state = {
        "quant_type": kind,
        "blocksize": size,
        "dtype": rows.dtype.name,
        "shape": rows.shape,
    }

    def codes():
        # The first code is to be in the high bits.
        found = rows.stored("codes").reshape(-1, 1)
        return found >> np.uint8(4) | found << np.uint8(4)

    def absmax():
        found = np.ascontiguousarray(rows.stored("scale")).reshape(-1)
        return found.view(np.dtype(format.scale_dtype)).astype(np.float32)

    def quant_map():
        # (There, zero has no sign.)
        return np.asarray(format.to_points(np.arange(16, dtype=np.uint8))) + 0

    number = -(-total // size)
    parts = {
        name: Part("U8", (-(-total // 2), 1), codes),
        f"{name}.quant_map": Part("F32", (16,), quant_map),
    }
    key = f"{name}.quant_state.bitsandbytes__{kind}"
    if nested is None:
        parts[f"{name}.absmax"] = Part("F32", (number,), absmax)
        return parts | {key: _text(state)}
    return parts | _nested_parts(rows, nested.scale.block_size, number, key, state)


def _nested_parts(rows, size, number, key, state):
    blocks = -(-number // size)

    def stored(key):
        return np.asarray(rows.all_stored["scale"][key])

    def absmax():
        of_rows = stored("scale")
        index, start = row_blocks(stored("codes").shape, size, blocks)
        found = np.zeros(blocks + 1, np.uint32)
        found[index] = of_rows
        if np.any(found[index] != of_rows) or np.any(stored("start") != start):
            raise rows.refused("it has some of the rows of a matrix, and not all")
        return found[:-1]

    def offset():
        mean = stored("offset").view(np.float32).item()
        return _text(state | {"nested_offset": mean}, length).make()

    state = state | {"nested_blocksize": size, "nested_dtype": "float32"}
    length = len(json.dumps(state | {"nested_offset": 0})) + _longest_offset
    return {
        f"{rows.name}.absmax": Part("U8", (number,), lambda: stored("codes")),
        f"{rows.name}.nested_absmax": Part("F32", (blocks,), absmax),
        f"{rows.name}.nested_quant_map": Part(
            "F32", (256,), lambda: stored("codebook")
        ),
        key: Part("U8", (length,), offset),
    }


def _text(state, length=0):
    text = json.dumps(state).ljust(length).encode()
    return Part("U8", (len(text),), lambda: np.frombuffer(text, np.uint8))


def bitsandbytes_config(formats: dict[str, AbstractFormat]) -> dict[str, Any]:
    """What is to be said of a model with these formats."""
    nested = [isinstance(format, Nested) for format in formats.values()]
    bases = [f.base if isinstance(f, Nested) else f for f in formats.values()]
    kinds = sorted({_types[type(base)] for base in bases})
    if not kinds:
        return {}
    return {
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": kinds[0],
            "bnb_4bit_use_double_quant": any(nested),
        }
    }
