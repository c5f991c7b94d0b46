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
    """`step(y)` if it is wanted, or else `y`.

    (A loop: unlike `lax.cond`, it stays conditional if it is mapped over a stack.)
    """

    def body(carry):
        wanted, y = carry
        return lax.full_like(wanted, False), step(y)

    return lax.while_loop(lambda carry: carry[0], body, (wanted, y))[1]


def infinite_as_nan(scale: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """What kernels without branches make of scales that come after the sums. (Of the
    decoded weight, an infinite one makes an infinity only if nothing it is multiplied
    by is zero, or has another sign than the rest.)"""
    return scale + (scale - scale)


def exact_where_not_finite(kernel: Callable[..., Array]) -> Callable[..., Array]:
    """A kernel whose numbers that are not finite are computed again, as those of the
    reference product. So it may apply scales late, say, where an infinite one makes of
    `inf - inf` an infinity; as long as what is not finite leaves no finite number."""

    @ft.wraps(kernel)
    def fn(
        x: Float[Array, "m _"], stored: Stored, problem: Problem
    ) -> Float[Array, "m _"]:
        # (Float16 overflows where nothing is wrong.)
        dtype = np.promote_types(problem.dtype, np.float32)
        wide = dataclasses.replace(problem, dtype=dtype)
        y = kernel(x, stored, wide)

        def again(y):
            return jnp.where(jnp.isfinite(y), y, reference(x, stored, wide))

        return once(~jnp.all(jnp.isfinite(y)), again, y).astype(problem.dtype)

    return fn
