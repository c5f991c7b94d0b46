from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from ._base import AbstractFormat


class AbstractExact(AbstractFormat):
    """A format of a few integers, which come back as they were. `encode` is given no
    other numbers: [`eqquant.quantize`][] sees to that. It may be given them as integers
    or as booleans, too.

    - `domain`: the numbers that can be stored, in ascending order.
    - `dtype`: what arrays of integers and of booleans decode to.
    """

    domain: eqx.AbstractClassVar[tuple[int, ...]]
    dtype: eqx.AbstractVar[Any]

    def is_outside(self, w: Shaped[Array, "*s"]) -> Bool[Array, "*s"]:
        """Which of some numbers cannot be stored. NaN is one of those."""
        if w.dtype == bool:
            w = w.astype(jnp.uint8)
        outside = jnp.ones(w.shape, bool)
        for number in self.domain:
            if number >= 0 or not jnp.issubdtype(w.dtype, jnp.unsignedinteger):
                outside &= w != jnp.asarray(number, w.dtype)
        return outside

    @property
    def domain_text(self) -> str:
        """As in a sentence: `"-1, 0 and 1"`."""
        *some, last = map(str, self.domain)
        return f"{', '.join(some)} and {last}"
