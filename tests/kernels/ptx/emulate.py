"""Runs the kernels for NVIDIA GPUs on a CPU, lane by lane: the same sources, compiled
by the system's C++ compiler with the `lane.cuh` of this folder."""

import ctypes
import functools as ft
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
from unittest import mock

import jax
import numpy as np

from eqquant.kernels.gpu.ptx import _cache, _product


compiler = shutil.which("g++") or shutil.which("clang++")
# (XLA may run several calls of a program at once, but lanes are global variables.)
_one_at_a_time = threading.Lock()
_lane = pathlib.Path(__file__).with_name("lane.cuh")


def run(kernel, x, stored, problem):
    """What a kernel computes, with its calls emulated."""
    with (
        mock.patch.object(_product, "ptx_of", lambda source, _: source),
        mock.patch.object(_product, "call", _call),
    ):
        return kernel(x, stored, problem)


def _call(source, name, result, *, grid, block):
    # (On 256 bytes, as XLA places arrays.)
    def aligned(a):
        memory = np.empty(a.nbytes + 256, np.uint8)
        at = -memory.ctypes.data % 256
        place = memory[at : at + a.nbytes].view(a.dtype).reshape(a.shape)
        place[...] = a
        return place

    def emulated(*operands):
        arrays = [aligned(np.asarray(a)) for a in operands]
        arrays.append(aligned(np.full(result.shape, np.nan, result.dtype)))
        # (The sizes are not constants of it here: it is compiled for several.)
        first, sizes, rest = re.split(r"Sizes\{([\d, ]+)\}", source)
        sizes = [int(size) for size in sizes.split(",")]
        function = _compiled(f"{first}sizes{rest}", name).emulate
        function.restype = ctypes.c_char_p
        number = len(arrays)
        with _one_at_a_time:
            error = function(
                (ctypes.c_int * 3)(*grid),
                block,
                number,
                (ctypes.c_void_p * number)(*(a.ctypes.data for a in arrays)),
                (ctypes.c_longlong * number)(*(a.nbytes for a in arrays)),
                (ctypes.c_int * len(sizes))(*sizes),
            )
        assert error == b"", error
        return arrays[-1]

    return lambda *operands: jax.pure_callback(emulated, result, *operands)


@ft.cache
def _compiled(source, name):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        for header, text in _cache.headers().items():
            text = _lane.read_text("utf-8") if header == "lane.cuh" else text
            (path / header).write_text(text, "utf-8")
        include, rest = source.split("\n", 1)
        program = f"{include}\nstatic Sizes sizes;\n{rest}\nEMULATE({name})\n"
        (path / "product.cpp").write_text(program, "utf-8")
        # (Variables of the same name in several libraries would be one.)
        options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
        assert compiler is not None
        command = [compiler, *options, "-o", "product.so", "product.cpp"]
        subprocess.run(command, cwd=path, check=True)
        return ctypes.CDLL(str(path / "product.so"))
