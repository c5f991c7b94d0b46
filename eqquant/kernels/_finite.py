import dataclasses
import functools as ft
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..formats import Stored
from ._problem import Problem
from ._reference import reference


def once(
    wanted: Array, step: Callable[[Float[Array, "m _"]], Array], y: Float[Array, "m _"]
) -> Float[Array, "m _"]:
    """Returns `step(y)` if `wanted`, and otherwise `y`.

    (It is a loop of at most one step. Under `vmap`, `lax.cond` would become a `select`
    that always computes both branches; a loop stays conditional.)
    """

    def body(carry):
        wanted, y = carry
        return lax.full_like(wanted, False), step(y)

    return lax.while_loop(lambda carry: carry[0], body, (wanted, y))[1]


def infinite_as_nan(scale: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Replaces infinite scales by NaN, for kernels without branches that apply scales
    after the sum. (With the decoded weight, an infinite scale gives an infinity or NaN,
    depending on the signs and zeros of the numbers that it multiplies.)"""
    return scale + (scale - scale)


def exact_where_not_finite(kernel: Callable[..., Array]) -> Callable[..., Array]:
    """Replaces the results of a kernel that are not finite by results of the reference
    product. The kernel may then apply scales after the sum, for example, where an
    infinite scale gives an infinity in the place of `inf - inf`. Operands that are not
    finite must not give a finite result, since finite results are kept.
    """

    @ft.wraps(kernel)
    def fn(
        x: Float[Array, "m _"], stored: Stored, problem: Problem
    ) -> Float[Array, "m _"]:
        # (In float16, finite operands may overflow.)
        dtype = np.promote_types(problem.dtype, np.float32)
        wide = dataclasses.replace(problem, dtype=dtype)
        y = kernel(x, stored, wide)

        def again(y):
            return jnp.where(jnp.isfinite(y), y, reference(x, stored, wide))

        return once(~jnp.all(jnp.isfinite(y)), again, y).astype(problem.dtype)

    return fn
