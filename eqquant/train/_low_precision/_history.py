import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ...formats import FP8


# The largest absolute value of an array is counted in a bin for each power of two: bin
# `i` reaches up to `1.75 * 2**(i - 127)`. This is the largest number of `e4m3` and of
# `e5m2`, times a power of two. So no bin loses any range when its end is rounded up,
# and all scales are powers of two, by which division is exact. Bin 0 stays empty: no
# normal number is in it.
bins = 256
_reach = 1.75


class History(eqx.Module):
    """The largest absolute values of the operands of a product in earlier steps: of the
    inputs, of the weight and of the cotangent.

    - `steps`: the number of further steps for which each bin counts. These are
        integers, which no optimizer changes.
    - `seen`: zeros. The gradient with respect to them reports a step: for each bin, how
        many arrays had their largest value in it. (A sum of gradients, over devices or
        parts of a batch, therefore finds the largest value of all.)
    """

    steps: Int[Array, "*b 3 bins"]
    seen: Float[Array, "*b 3 bins"]

    @staticmethod
    def empty(lead: Sequence[int]) -> "History":
        shape = (*lead, 3, bins)
        return History(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))

    def merged(self) -> "History":
        """Returns one history for all leading axes."""
        lead = tuple(range(self.steps.ndim - 2))
        return History(jnp.max(self.steps, lead), jnp.sum(self.seen, lead))

    def scale(self, operand: int, format: FP8) -> Float[Array, "*b"]:
        """Returns the scale of an operand, or zero if it has no history."""
        steps = self.steps[..., operand, :]
        number = lax.broadcasted_iota(jnp.int32, steps.shape, steps.ndim - 1)
        found = jnp.max(jnp.where(steps > 0, number, 0), axis=-1)
        return jnp.where(found > 0, _scale_of(found, format), 0)

    def next(self, seen: Float[Array, "*b 3 bins"], lengths: Sequence[int]):
        """Returns the history after a step that has reported `seen`."""
        fresh = np.array(lengths, np.int32)[:, None]
        fresh = jnp.broadcast_to(fresh, self.steps.shape)
        steps = jnp.where(seen != 0, fresh, jnp.maximum(self.steps - 1, 0))
        return History(steps, jnp.zeros_like(self.seen))


def bin_of(x: Float[Array, "..."], stack: int) -> Int[Array, "*b"]:
    """Returns the bin of the largest absolute value of each array of a stack. Zero if
    the value is zero or not finite."""
    largest = _largest(x, stack)
    return jnp.where(largest < jnp.inf, _bin(largest), 0)


def counts(bin: Int[Array, "*s"]) -> Float[Array, "*s bins"]:
    """Returns the report of a step, as the gradient with respect to `seen`."""
    return jax.nn.one_hot(jnp.where(bin > 0, bin, -1), bins)


def or_current(
    scale: Float[Array, "*b"], x: Float[Array, "..."], format: FP8
) -> Float[Array, "*b"]:
    """Returns the scale, or the scale of the current array where it is zero."""

    def current(scale, x):
        found = _scale_of(_bin(_largest(x, scale.ndim)), format)
        return jnp.where(scale > 0, scale, found)

    # (With `where` alone, no array could be rounded before its largest value is known.)
    known = jnp.all(scale > 0)
    return lax.cond(known, lambda scale, x: scale, current, scale, x)


def _largest(x, stack):
    axes = tuple(range(stack, x.ndim))
    # XLA would write `abs(x)` to memory before taking its maximum.
    high, low = jnp.max(x, axes, initial=0), jnp.min(x, axes, initial=0)
    return jnp.maximum(high, -low).astype(jnp.float32)


def _bin(largest):
    # The exponent, plus one where the mantissa exceeds 0.75.
    bits = lax.bitcast_convert_type(jnp.abs(largest), jnp.uint32)
    return (bits + np.uint32(2**21 - 1) >> np.uint32(23)).astype(jnp.int32)


def _scale_of(bin, format):
    power = int(math.log2(float(jnp.finfo(format.dtype).max) / _reach))
    exponent = jnp.clip(bin - power, 1, 254).astype(jnp.uint32)
    return lax.bitcast_convert_type(exponent << np.uint32(23), jnp.float32)
