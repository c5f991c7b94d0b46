import jax
import jax.numpy as jnp
import numpy as np

import eqquant as eqq

from .case import Case
from .formats import draw_often, name_of
from .oracle import product, wrong
from .problems import kernels, problem_of


_rows = (1, 1, 2, 3, 4, 5, 8, 16, 17)


def long_sums(case: Case) -> None:
    """`x @ q` by each kernel that can do it, of up to 2**18 terms of one sign: where
    roundings in one direction add up."""
    format = draw_often(case)
    size = case.integer(1, 40), int(2 ** case.rng.uniform(12, 18))
    axis, prepacked = case.pick((-2, -1)), case.chance(0.5)
    kind = case.pick(("constant", "constant", "normal", "falling"))
    w = np.full(size, case.rng.standard_normal())
    x = np.full((case.pick(_rows), size[1]), case.rng.standard_normal())
    if kind == "normal":
        w, x = (np.abs(case.rng.standard_normal(a.shape)) for a in (w, x))
    elif kind == "falling":
        # After the first, each is little more than half of the last bit of the sum.
        x[:, 1:] *= 2.0**-24 * case.rng.uniform(1, 1.9)
    q = eqq.quantize(jnp.asarray(w, jnp.float32), format, axis=axis)
    q = (eqq.tree_prepack(q) if prepacked else q).T
    x = jnp.asarray(x, jnp.float32)
    problem = problem_of(x, q)
    expected = product(x, q.dequantize())
    for kernel in kernels(problem):
        y = jax.jit(lambda x, q: eqq.qmatmul(x, q, kernel=kernel.name))(x, q)  # noqa: B023
        case.check(
            f"{x.shape[0]} rows, {q}{', prepacked' * prepacked}",
            wrong(y, expected, kernel.bound(problem)),
            kind="long sum",
            format=name_of(format),
            kernel=kernel.name,
            inputs=kind,
        )
