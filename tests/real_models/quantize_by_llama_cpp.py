"""Has llama.cpp quantize a file: `python quantize_by_llama_cpp.py SOURCE OUT TYPE
[NPZ]`, with a Python that has the package llama_cpp (llama-cpp-python), and needs none
of this one. TYPE is a number of `enum llama_ftype`, and NPZ has the mean square of each
input of each tensor, by its name."""

import ctypes
import sys

import llama_cpp
import numpy as np


class Importance(ctypes.Structure):
    """`struct llama_model_imatrix_data` of llama.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.POINTER(ctypes.c_float)),
        ("size", ctypes.c_size_t),
    ]


def main(source, out, number, matrix=None):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = int(number), 2
    # The embedding and the output stay in float32, as in the other tables.
    params.token_embedding_type = params.output_tensor_type = 0
    if matrix is not None:
        squares = dict(np.load(matrix))
        entries = [
            Importance(name.encode(), x.ctypes.data_as(_floats), x.size)
            for name, x in squares.items()
        ]
        # (One without a name is the end.)
        table = (Importance * (len(entries) + 1))(*entries)
        params.imatrix = ctypes.cast(table, dict(params._fields_)["imatrix"])
    return llama_cpp.llama_model_quantize(
        source.encode(), out.encode(), ctypes.byref(params)
    )


_floats = ctypes.POINTER(ctypes.c_float)

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
