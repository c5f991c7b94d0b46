import functools as ft
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._array import is_quantized
from ...formats import AbstractFormat, FP8, Int, Int4, Int8, MXFP4, NVFP4
from .._layouts import resized
from ._gptq import has_zeros
from ._part import dense, kind_of, Part, Rows
from ._stream import as_words, repacked


def compressed_parts(name: str, x: Any) -> dict[str, Part]:
    """An array as compressed-tensors has it.

    **Raises:**

    A `ValueError` if it has no such format.
    """
    if not is_quantized(x):
        return dense(name, x)
    rows = Rows(name, x, "compressed-tensors")
    if compressed_scheme(rows.format) is None:
        raise rows.refused(
            "it has `Int`, without minima, `Int4`, `Int8`, `FP8`, `MXFP4` and "
            "`NVFP4(inverse=True)`"
        )
    if len(rows.shape) != 2:
        raise rows.refused(f"it should be a matrix; the shape is {rows.shape}")
    assert rows.name == f"{rows.prefix}weight"
    if isinstance(rows.format, Int | Int4):
        return _integers(rows)
    if isinstance(rows.format, Int8 | FP8):
        return _eight(rows)
    return _e2m1(rows)


def _integers(rows):
    n, k = rows.shape
    name, format, groups = rows.name, rows.format, rows.groups
    bits = int(format.bits)
    words = -(-k * bits // 32)

    def packed():
        return as_words(resized(rows.stored("codes"), 4 * words))

    def zeros():
        found = rows.stored("zero_point")
        if found.max(initial=0) >= 2**bits:
            raise rows.refused(f"it has zero-points of more than {bits} bits")
        # Down the rows.
        found = np.ascontiguousarray(found.swapaxes(0, 1), np.uint8)
        return repacked(found, bits).swapaxes(0, 1)

    parts = {
        f"{name}_packed": Part("I32", (n, words), packed),
        f"{name}_scale": _scale(rows),
        f"{name}_shape": Part("I64", (2,), lambda: np.array((n, k), np.int64)),
    }
    if has_zeros(format):
        shape = (-(-n * bits // 32), groups)
        parts[f"{name}_zero_point"] = Part("I32", shape, zeros)
    if isinstance(format, Int) and format.ordered:
        index = lambda: rows.stored("block")[0]
        parts[f"{name}_g_idx"] = Part("I32", (k,), index)
    return parts


def _eight(rows):
    kind = "I8"
    if isinstance(rows.format, FP8):
        kind = kind_of(rows.name, rows.format.dtype)
    codes = ft.partial(rows.stored, "codes")
    return {
        rows.name: Part(kind, rows.shape, codes),
        f"{rows.name}_scale": _scale(rows),
    }


def _e2m1(rows):
    n, k = rows.shape
    if k % rows.format.block_size != 0:
        raise rows.refused(
            f"rows should have a multiple of {rows.format.block_size} numbers"
        )
    name = rows.name
    kind = "U8" if rows.format == MXFP4() else "F8_E4M3"
    parts = {
        f"{name}_packed": Part("U8", (n, k // 2), ft.partial(rows.stored, "codes")),
        f"{name}_scale": Part(
            kind, (n, k // rows.format.block_size), ft.partial(rows.stored, "scale")
        ),
    }
    if kind == "F8_E4M3":
        whole = ft.partial(rows.stored, "global_scale")
        parts[f"{name}_global_scale"] = Part("F32", (1,), whole)
    return parts


def _scale(rows):
    shape = (rows.shape[0], rows.groups)
    if isinstance(rows.format, FP8) and rows.format.scale == "tensor":
        shape = (1,)
    kind = kind_of(rows.name, rows.format.scale_dtype)
    return Part(kind, shape, ft.partial(rows.stored, "scale"))


def compressed_scheme(format: AbstractFormat) -> dict[str, Any] | None:
    """How compressed-tensors says this, and the name of its layout. `None` if it has no
    such format."""
    strategy = "channel" if format.block_size is None else "group"
    said = {
        "group_size": format.block_size,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    }
    if isinstance(format, Int | Int4) and getattr(format, "offset", None) != "minimum":
        ordered = isinstance(format, Int) and format.ordered
        said |= {"num_bits": int(format.bits), "type": "int"}
        said |= {"symmetric": not has_zeros(format)}
        said |= {"actorder": "group"} if ordered else {}
        return {"format": "pack-quantized", "weights": said}
    if isinstance(format, Int8):
        said |= {"num_bits": 8, "type": "int"}
        return {"format": "int-quantized", "weights": said}
    if isinstance(format, FP8) and format.dtype == jnp.float8_e4m3fn:
        said |= {"num_bits": 8, "type": "float"}
        said |= {"strategy": "tensor"} if format.scale == "tensor" else {}
        return {"format": "float-quantized", "weights": said}
    if format == NVFP4(inverse=True):
        said |= {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
        return {"format": "nvfp4-pack-quantized", "weights": said}
    if format == MXFP4():
        said |= {"num_bits": 4, "type": "float", "scale_dtype": "torch.uint8"}
        return {"format": "mxfp4-pack-quantized", "weights": said}
    return None


def compressed_config(formats: dict[str, AbstractFormat]) -> dict[str, Any]:
    """What is to be said of a model, of which each array has the format that its name
    goes with."""
    groups: dict[AbstractFormat, list[str]] = {}
    for name, format in formats.items():
        groups.setdefault(format, []).append(name.removesuffix(".weight"))
    if not groups:
        return {}
    schemes = [(compressed_scheme(f) or {}, names) for f, names in groups.items()]
    layouts = {scheme["format"] for scheme, _ in schemes}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{i}": {"targets": names, **scheme}
                for i, (scheme, names) in enumerate(schemes)
            },
        }
    }
