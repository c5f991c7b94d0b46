import jax

import eqquant as eqq
import eqquant.kernels._table as table


def supporting(problem):
    """All kernels that can compute a problem, with their bounds for it."""
    found = table.supporting(problem)
    return [kernel._replace(error=kernel.short_bound(problem)) for kernel in found]


def kernels(x, q):
    """All kernels that do `x @ q`."""
    return supporting(eqq.explain(x, q).problem)


@jax.jit
def every_product(x, q):
    """`x @ q` by each of them."""
    names = [kernel.name for kernel in kernels(x, q)]
    return {name: eqq.qmatmul(x, q, kernel=name) for name in names}
