"""llama.cpp's own quantization of the same model, read back by `eqquant.interop`."""

import importlib.util
import os
import pathlib
import resource
import subprocess
import sys
import tempfile

import numpy as np

import eqquant as eqq
from eqquant import demo, interop

from ..interop.llama_names import matrices
from .rows import batches, bits_of, logits, Row


# The numbers of `enum llama_ftype`.
types = {"Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "IQ2_XS": 20, "IQ3_S": 26}
# What llama.cpp quantizes only with an importance matrix.
_needs_imatrix = ("IQ2_XS",)
_script = pathlib.Path(__file__).with_name("quantize_by_llama_cpp.py")


def python() -> str | None:
    """A Python with the package llama_cpp: the one that `EQQUANT_LLAMA_CPP` names, or
    this one."""
    found = importlib.util.find_spec("llama_cpp")
    return os.environ.get("EQQUANT_LLAMA_CPP", found and sys.executable)


def importance(stats, depth):
    """The mean square of each input of each matrix, by its name in llama.cpp."""
    found = {}
    for path, name in matrices.items():
        gram = stats[f"layers.{path}.weight"]
        squares = np.asarray(gram.diagonal / gram.rows[..., None])
        # (Inputs are the same for all rows.)
        for i, x in enumerate(squares.reshape(depth, -1, squares.shape[-1])[:, 0]):
            found[f"blk.{i}.{name}.weight"] = np.ascontiguousarray(x)
    return found


def rows(path, depth, predictions, stats, held_out):
    """A row for each type, without and with an importance matrix."""
    with tempfile.TemporaryDirectory() as folder:
        source, matrix = (pathlib.Path(folder) / x for x in ("f32.gguf", "squares.npz"))
        np.savez(matrix, **importance(stats, depth))
        with interop.open(path) as checkpoint:
            arrays = {name: checkpoint[name] for name in checkpoint}
            metadata = checkpoint.metadata | {"general.file_type": 0}
            interop.write_gguf(source, eqq.tree_dequantize(arrays), metadata)
        for name, number in types.items():
            for more in ([], [matrix]):
                if not more and name in _needs_imatrix:
                    continue
                out = source.with_name(f"{name}.gguf")
                start = _seconds()
                command = [python(), _script, source, out, number, *more]
                subprocess.run(list(map(str, command)), check=True, capture_output=True)
                seconds = _seconds() - start
                with interop.open(out) as checkpoint:
                    model = demo.load_llama(checkpoint)
                text, found = batches(held_out), eqq.tree_dequantize(model).stacked()
                loss = eqq.evaluate(logits, found, text, dense=predictions)
                method = "llama.cpp, imatrix" if more else "llama.cpp"
                yield Row(name, method, bits_of(model), loss, seconds)


def _seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
