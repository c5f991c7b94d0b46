from collections.abc import Callable

from .._problem import Problem


def predicted(written: float | int, rate: float | int) -> Callable[[Problem], float]:
    """Returns a function that estimates the time of a kernel from the memory bandwidth
    and the tensor cores of an H100: the weight is read once, at 3 TB/s, and multiplied.
    (The times were not measured; only the order of the kernels matters.)

    **Arguments:**

    - `written`: the bytes that the kernel writes to memory and reads back for each
        number of the weight.
    - `rate`: the number of operations per second.
    """

    def seconds(problem: Problem) -> float:
        rows = 64 if problem.rows is None else problem.rows
        memory = (1 + 2 * written) / 3e12
        return problem.numbers * (memory + 2 * rows / rate)

    return seconds
