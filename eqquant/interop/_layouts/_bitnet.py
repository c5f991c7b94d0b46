from collections.abc import Iterator

import numpy as np

from ...formats import Ternary
from .._checkpoint import Entry
from ._base import bits_of, check, floats, Source, to_quantized
from ._registry import register_layout


_per_byte = 5


def find_bitnet(source: Source) -> Iterator[Entry]:
    """Finds arrays of BitNet b1.58 in Hugging Face: `weight`, with four rows in each
    byte, a quarter of the matrix apart, and `weight_scale`. `BitLinear` divides by the
    scale, and `AutoBitLinear` multiplies by it."""
    for name, weight in source.tensors.items():
        scale = source.get(f"{name}_scale", *floats)
        if not name.endswith("weight") or weight.kind != "U8" or scale is None:
            continue
        if scale.shape in ((), (1,)):
            yield _entry(source, name, weight, scale)


def _entry(source, name, weight, scale):
    check(weight.ndim == 2, f"{name!r} should have two axes", weight)
    n, k = 4 * weight.shape[0], weight.shape[1]
    divides = source.config.get("linear_class", "bitlinear") != "autobitlinear"
    format = Ternary(scale="tensor")

    def to_array():
        packed = weight.read()
        codes = np.empty((n, -(-k // _per_byte) * _per_byte), np.uint8)
        for i in range(4):
            digits = packed >> np.uint8(2 * i) & np.uint8(3)
            if digits.max(initial=0) > 2:
                raise ValueError(f"{name!r} has numbers other than -1, 0 and 1.")
            codes[i * n // 4 : (i + 1) * n // 4, :k] = digits
        # The last byte is padded with digits 0.
        codes[:, k:] = 0
        digits = codes.reshape(n, -1, _per_byte)
        codes = digits @ (3 ** np.arange(_per_byte)).astype(np.uint8)
        gamma = scale.read().astype(np.float32).reshape(1, 1)
        gamma = 1 / gamma if divides else gamma
        stored = {"codes": codes, "scale": bits_of(gamma)}
        return to_quantized(stored, format, (n, k), scale.dtype)

    return Entry(name, (n, k), scale.dtype, format, "bitnet", (weight, scale), to_array)


register_layout(
    "bitnet", find_bitnet, hints={"linear_class": ("bitlinear", "autobitlinear")}
)
