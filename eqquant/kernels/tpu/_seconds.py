from collections.abc import Callable

from .._problem import Problem


def bundles(number: float | int) -> Callable[[Problem], float]:
    """Returns the predicted time of a kernel in which a tile of 2048x512 numbers of the
    weight takes about `number` bundles of instructions, each a cycle of a v6e. (The
    times were not measured: only the order of the kernels counts.)"""
    return lambda problem: problem.numbers * number / (2048 * 512) / 1.75e9
