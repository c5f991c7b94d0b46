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


def largest_error(problem: Problem, flipped: bool) -> tuple[float, str]:
    """The bound that holds whichever kernel is chosen, of however many rows, and what
    it is provided by. Of the transposed product if `flipped`, as in a derivative."""
    if flipped:
        product = "matmul" if problem.product != "matmul" else "matmul_transposed"
        problem = dataclasses.replace(problem, product=product, activation=None)
    found = [
        kernel
        for rows in (1, 2, 9, 16, 64, problem.rows)
        for kernel in kernels(dataclasses.replace(problem, rows=rows))
    ]
    conditions = [kernel.provided for kernel in found if kernel.provided]
    return max(kernel.error for kernel in found), "; ".join(sorted(set(conditions)))
