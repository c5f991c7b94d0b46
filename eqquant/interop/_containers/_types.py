from typing import NamedTuple

import ml_dtypes
import numpy as np


# The dtypes by their names in safetensors.
dtypes: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


class GGMLType(NamedTuple):
    """A type of GGUF tensors.

    - `block`, `nbytes`: the number of elements in a block, and its size in bytes.
    - `dtype`: the NumPy dtype, if the type is plain, without blocks.
    """

    name: str
    block: int
    nbytes: int
    dtype: np.dtype | None = None

    @property
    def is_plain(self) -> bool:
        return self.block == 1


def _plain(name: str, dtype) -> GGMLType:
    return GGMLType(name, 1, np.dtype(dtype).itemsize, np.dtype(dtype))


# The types by their numbers in files.
ggml_types: dict[int, GGMLType] = {
    0: _plain("F32", np.float32),
    1: _plain("F16", np.float16),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: _plain("I8", np.int8),
    25: _plain("I16", np.int16),
    26: _plain("I32", np.int32),
    27: _plain("I64", np.int64),
    28: _plain("F64", np.float64),
    29: GGMLType("IQ1_M", 256, 56),
    30: _plain("BF16", ml_dtypes.bfloat16),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
    42: GGMLType("Q2_0", 64, 18),
}

ggml_numbers: dict[str, int] = {type.name: i for i, type in ggml_types.items()}
