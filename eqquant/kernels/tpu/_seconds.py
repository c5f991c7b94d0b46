from collections.abc import Callable

from .._problem import Problem


def bundles(number: float | int) -> Callable[[Problem], float]:
    """The time of a kernel in which a tile of 2048x512 numbers of the weight takes
    about so many bundles of instructions, and as many cycles of a v6e. (No time was
    measured: it is the order of the kernels that counts.)"""
    return lambda problem: problem.numbers * number / (2048 * 512) / 1.75e9
