import jax

import eqquant as eqq
import eqquant.kernels._table as table


def kernels(x, q):
    """All kernels that do `x @ q`."""
    problem = eqq.explain(x, q).problem
    every = [*table._candidates(problem), table._reference]
    return [kernel for kernel in every if table._refusal(kernel, problem) is None]


@jax.jit
def every_product(x, q):
    """`x @ q` by each of them."""
    names = [kernel.name for kernel in kernels(x, q)]
    return {name: eqq.qmatmul(x, q, kernel=name) for name in names}
