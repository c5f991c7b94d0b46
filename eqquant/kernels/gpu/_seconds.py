import re
from collections.abc import Callable
from typing import NamedTuple

from .._problem import Problem
from ._devices import compiled_for


class Rates(NamedTuple):
    """What a GPU can do in a second.

    - `bytes`: the bytes of memory that it reads or writes: nine tenths of what the data
      sheet says, about what was measured on an H100.
    - `instructions`: the instructions of single lanes that it issues: 128 in each clock
      of a multiprocessor.
    - `operations`: the operations of its tensor cores in bfloat16, accumulated in
      float32.
    """

    bytes: float
    instructions: float
    operations: float


class _Sheet(NamedTuple):
    # The memory bandwidth in GB/s, the number of multiprocessors, the boost clock in
    # GHz, and the dense TFLOPS in bfloat16.
    bandwidth: int
    processors: int
    clock: float
    tera: int


# From NVIDIA's data sheets, by the names of GPUs.
_sheets = {
    r"\bA100|\bA800": _Sheet(1555, 108, 1.41, 312),
    r"\bA10\b|\bA10G": _Sheet(600, 72, 1.70, 125),
    r"RTX 30\d0": _Sheet(936, 82, 1.70, 71),
    r"\bL4\b": _Sheet(300, 58, 2.04, 121),
    r"\bL40": _Sheet(864, 142, 2.49, 362),
    r"RTX 40\d0": _Sheet(1008, 128, 2.52, 165),
    r"\bH100|\bH800": _Sheet(3350, 132, 1.755, 989),
    r"H200": _Sheet(4800, 132, 1.755, 989),
    r"\bG?B[123]00": _Sheet(8000, 148, 1.965, 2250),
    r"RTX 50\d0": _Sheet(1792, 170, 2.41, 209),
}
_if_unknown = _sheets[r"\bH100|\bH800"]


def rates() -> Rates:
    """Returns the rates of the GPU for which programs are compiled: those of an H100 if
    it is unknown."""
    name = compiled_for() or ""
    found = (sheet for pattern, sheet in _sheets.items() if re.search(pattern, name))
    bandwidth, processors, clock, tera = next(found, _if_unknown)
    return Rates(0.9e9 * bandwidth, 128e9 * processors * clock, 1e12 * tera)


def predicted(
    written: float | int, efficiency: float | int
) -> Callable[[Problem], float]:
    """Returns a function that estimates the time of a kernel from the rates of the GPU:
    the weight is read once, and multiplied. (The times were not measured; only the
    order of the kernels matters.)

    **Arguments:**

    - `written`: the bytes that the kernel writes to memory and reads back for each
        number of the weight.
    - `efficiency`: the part of the rate of the tensor cores that it reaches, as
        estimated on an H100.
    """

    def seconds(problem: Problem) -> float:
        rows, now = 64 if problem.rows is None else problem.rows, rates()
        memory = (1 + 2 * written) / now.bytes
        return problem.numbers * (memory + 2 * rows / (efficiency * now.operations))

    return seconds
