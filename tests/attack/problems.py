import dataclasses
from typing import Any

import jax

import eqquant as eqq
import eqquant.kernels._table as table
from eqquant.kernels import Problem


def problem_of(x: Any, q: eqq.QuantizedArray) -> Problem:
    """That of `x @ q`."""
    return eqq.explain(jax.ShapeDtypeStruct(x.shape, x.dtype), q).problem


def kernels(problem: Problem) -> list[Any]:
    """All kernels that can do it."""
    return table.supporting(problem)


def largest_error(
    problem: Problem, flips: tuple[bool, ...] = (False,), rounds: bool = True
) -> tuple[float, str]:
    """The bound that holds whichever kernels are chosen, of however many rows, and what
    it is provided by. The products are transposed or not, as `flips` says. Where `x` is
    not rounded, as in a derivative, activation formats play no part."""
    found = [
        (kernel, some)
        for flipped in flips
        for rows in (1, 2, 9, 16, 64, problem.rows)
        for some in [_changed(problem, flipped, rounds, rows)]
        for kernel in kernels(some)
    ]
    conditions = {kernel.provided for kernel, _ in found if kernel.provided}
    bounds = [kernel.bound(some) for kernel, some in found]
    return max(bounds), "; ".join(sorted(conditions))


def highest_error(problem: Problem) -> float:
    """The bound of what is chosen for the highest precision. It holds for all
    operands."""
    problem = dataclasses.replace(problem, precision="highest")
    return table.choose(problem).kernel.bound(problem)


def _changed(problem, flipped, rounds, rows):
    others = {"matmul": "matmul_transposed", "matmul_transposed": "matmul"}
    return dataclasses.replace(
        problem,
        product=others[problem.product] if flipped else problem.product,
        activation=problem.activation if rounds else None,
        rows=rows,
    )
