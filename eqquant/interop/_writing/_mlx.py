from typing import Any

from ..._array import is_quantized
from ...formats import AbstractFormat, Int, MXFP4, MXFP8
from ._part import dense, kind_of, Part, Rows


def mlx_parts(name: str, x: Any) -> dict[str, Part]:
    """An array as MLX has it.

    **Raises:**

    A `ValueError` if MLX has no such format.
    """
    if not is_quantized(x):
        return dense(name, x)
    rows = Rows(name, x, "MLX")
    config = mlx_scheme(rows.format)
    if config is None:
        raise rows.refused(
            "it has `Int(bits, block_size, offset='minimum')` of 2, 3, 4, 5, 6 or 8 "
            "bits in blocks of 32, 64 or 128, `MXFP4()` and `MXFP8()`"
        )
    bits, size = config["bits"], config["group_size"]
    if rows.k % size != 0:
        raise rows.refused(f"rows should have a multiple of {size} numbers")
    *lead, k = rows.shape
    words, scales = (*lead, k * bits // 32), (*lead, k // size)
    parts = {name: Part("U32", words, lambda: rows.stored("codes"))}
    if config["mode"] != "affine":
        parts[f"{rows.prefix}scales"] = Part("U8", scales, lambda: rows.stored("scale"))
        return parts
    kind = kind_of(name, rows.format.scale_dtype)
    parts[f"{rows.prefix}scales"] = Part(kind, scales, lambda: rows.stored("scale"))
    parts[f"{rows.prefix}biases"] = Part(kind, scales, lambda: rows.stored("minimum"))
    return parts


def mlx_scheme(format: AbstractFormat) -> dict[str, Any] | None:
    """How a configuration of MLX says this. `None` if it has no such format."""
    if isinstance(format, Int) and format.offset == "minimum" and not format.ordered:
        bits, size = format.bits, format.block_size
        if bits in (2, 3, 4, 5, 6, 8) and size in (32, 64, 128):
            return {"group_size": size, "bits": bits, "mode": "affine"}
    if format == MXFP4():
        return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    if format == MXFP8("e4m3"):
        return {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    return None


def mlx_config(formats: dict[str, AbstractFormat]) -> dict[str, Any]:
    """What is to be said of a model, of which each array has the format that its name
    goes with."""
    if not formats:
        return {}
    each = {name.removesuffix(".weight"): mlx_scheme(f) for name, f in formats.items()}
    schemes = list(each.values())
    # Layers that differ from most say so.
    usual = max(schemes, key=schemes.count)
    others = {name: scheme for name, scheme in each.items() if scheme != usual}
    return {"quantization": (usual or {}) | others}
