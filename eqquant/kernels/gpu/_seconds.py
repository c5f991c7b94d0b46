from collections.abc import Callable

from .._problem import Problem


def predicted(written: float | int, rate: float | int) -> Callable[[Problem], float]:
    """The time of a kernel, as memory and tensor cores of an H100 would allow it: the
    weight is read once, at 3 TB/s, and multiplied. (It was not measured: it is the
    order of the kernels that counts.)

    **Arguments:**

    - `written`: the bytes for each number of the weight that the kernel writes to
        memory and reads back, on the way.
    - `rate`: operations in a second.
    """

    def seconds(problem: Problem) -> float:
        rows = 64 if problem.rows is None else problem.rows
        memory = (1 + 2 * written) / 3e12
        return problem.numbers * (memory + 2 * rows / rate)

    return seconds
