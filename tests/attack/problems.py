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
    every = [*table._candidates(problem), table._reference]
    return [kernel for kernel in every if table._refusal(kernel, problem) is None]


def largest_error(
    problem: Problem, flips: tuple[bool, ...] = (False,), rounds: bool = True
) -> tuple[float, str]:
    """The bound that holds whichever kernels are chosen, of however many rows, and what
    it is provided by. The products are transposed or not, as `flips` says. Where `x` is
    not rounded, as in a derivative, activation formats play no part."""
    found = [
        kernel
        for flipped in flips
        for rows in (1, 2, 9, 16, 64, problem.rows)
        for kernel in kernels(_changed(problem, flipped, rounds, rows))
    ]
    conditions = [kernel.provided for kernel in found if kernel.provided]
    return max(kernel.error for kernel in found), "; ".join(sorted(set(conditions)))


def _changed(problem, flipped, rounds, rows):
    others = {"matmul": "matmul_transposed", "matmul_transposed": "matmul"}
    return dataclasses.replace(
        problem,
        product=others[problem.product] if flipped else problem.product,
        activation=problem.activation if rounds else None,
        rows=rows,
    )
