import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from .._containers import ggml_numbers, ggml_types, Part


# Llama.cpp's numbers for whole files, by the type of most of their weights. (If a type
# has several numbers, this is the one for files with few other types.)
_numbers = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
    "IQ2_XXS": 19,
    "IQ2_XS": 20,
    "IQ3_XXS": 23,
    "IQ1_S": 24,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ2_S": 28,
    "IQ4_XS": 30,
    "IQ1_M": 31,
    "BF16": 32,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4": 38,
    "NVFP4": 39,
    "Q1_0": 40,
    "Q2_0": 41,
}


def file_type(parts: Iterable[Part]) -> dict[str, Any]:
    """Returns the metadata about the types of tensors: the type of most numbers in
    matrices, and the version of quantized types.

    ??? cite "Reference"

        https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    sizes: Counter[str] = Counter()
    for part in parts:
        if len(part.shape) > 1:
            sizes[part.kind] += math.prod(part.shape)
    found: dict[str, Any] = {}
    if sizes:
        (kind, _), *_ = sizes.most_common(1)
        if kind in _numbers:
            found["general.file_type"] = np.uint32(_numbers[kind])
    if any(not ggml_types[ggml_numbers[kind]].is_plain for kind in sizes):
        found["general.quantization_version"] = np.uint32(2)
    return found
