from collections.abc import Iterator

import ml_dtypes
import numpy as np

from ...formats import NVFP4
from .._checkpoint import Entry
from ._base import bits_of, check, Source, to_quantized
from ._registry import register_layout


_block = 16


def find_modelopt(source: Source) -> Iterator[Entry]:
    """Finds NVFP4 arrays of NVIDIA's ModelOpt: `weight` with two codes in a byte, and
    two scales that multiply, `weight_scale` for each 16 numbers and `weight_scale_2`
    for a matrix. (Its 8-bit floats have the layout of compressed-tensors.)"""
    for name, weight in source.tensors.items():
        scale = source.get(f"{name}_scale", "F8_E4M3")
        whole = source.get(f"{name}_scale_2", "F32")
        if weight.kind == "U8" and scale is not None and whole is not None:
            yield _entry(source, name, weight, scale, whole)


def _entry(source, name, weight, scale, whole):
    *lead, half = weight.shape or (0,)
    shape = (*lead, 2 * half)
    stacks = tuple(lead[:-1])
    check(
        weight.ndim >= 2
        and scale.shape == (*lead, -(-shape[-1] // _block))
        and whole.shape in ((), (1,), stacks, (*stacks, 1), (*stacks, 1, 1)),
        f"{name!r} should have a scale for each {_block} numbers, and one for a matrix",
        *(weight, scale, whole),
    )
    format, dtype = NVFP4(), source.dtype_or(ml_dtypes.bfloat16)

    def to_array():
        number = whole.read()
        ones = (1, 1) if number.size == 1 else (*stacks, 1, 1)
        number = np.broadcast_to(number.reshape(ones), (*stacks, 1, 1))
        stored = {
            "codes": weight.read(),
            "scale": bits_of(scale.read()),
            "global_scale": bits_of(np.ascontiguousarray(number)),
        }
        return to_quantized(stored, format, shape, dtype)

    sources = (weight, scale, whole)
    return Entry(name, shape, dtype, format, "modelopt", sources, to_array)


register_layout("modelopt", find_modelopt)
