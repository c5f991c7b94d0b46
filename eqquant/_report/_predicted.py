import math
from typing import NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from .._product import as_tuple, Axis, normalise_axis
from .._solvers import GPTQ, mean_of_factors, ScaleSearch, solved
from .._trace import Gram
from ..formats import AbstractFormat, Rotated


# So many rows of a weight are rounded, to see how much noise a format adds.
_rows = 8


class Prediction(NamedTuple):
    """What a weight costs in a format, and what it loses.

    - `bits`: bits per weight, scales included.
    - `error`: what the loss increases by, up to a factor that all weights share.
    """

    bits: float
    error: float


class Predictor:
    """Predicts what weights lose in formats by GPTQ, without rounding them.

    The loss increases by the mean over tokens of `(g . e x)^2`, up to a factor, where
    `e` is the error of the weight, `x` its input, and `g` the gradient at its outputs.
    With errors that have nothing to do with gradients, that is the mean of `|e x|^2`,
    times the mean square of an element of `g`. The latter is the square of the gradient
    of the weight over that of its inputs; and the former is what the factors of the
    Gram leave of the noise of the format.
    """

    def __init__(self):
        self._factors = {}

    def __call__(
        self,
        w: Float[Array, "..."],
        axis: Axis,
        format: AbstractFormat,
        gram: Gram | None,
        gradient: Float[Array, ""],
    ) -> Prediction:
        contracted = as_tuple(normalise_axis(axis, w.shape))
        last = tuple(range(-len(contracted), 0))
        rows = jnp.moveaxis(jnp.asarray(w), contracted, last).astype(jnp.float32)
        k = math.prod(rows.shape[w.ndim - len(contracted) :])
        shape = (*rows.shape[: w.ndim - len(contracted)], k)
        rows = rows.reshape(-1, k)
        stored = jtu.tree_leaves(format.structs(shape))
        bits = 8 * sum(math.prod(a.shape) * a.dtype.itemsize for a in stored) / w.size
        some = rows[:: max(1, len(rows) // _rows)][:_rows]
        # (`GPTQ()` finds better scales, too.)
        search = ScaleSearch()
        by = search if search.applies(format) else None
        q = solved(some, format, by, axis=-1)
        total = lambda a: float(jnp.sum(jnp.square(a)))
        size = total(some)
        noise = 0.0 if size == 0 else total(q.dequantize() - some) / size
        left = self._left(format, gram)
        square = total(rows) / (len(rows) * k)
        return Prediction(bits, float(gradient) * noise * square * left)

    def _left(self, format, gram):
        # What GPTQ leaves of the error.
        if gram is None or gram.is_diagonal or not GPTQ().applies(format):
            return 1.0
        rotation = None
        if isinstance(format, Rotated):
            rotation = format.block, format.seed
        key = id(gram.value), rotation
        if key not in self._factors:
            value = gram.value
            if isinstance(format, Rotated):
                value = format.rotate_gram(value, 2)
            found = float(np.mean(mean_of_factors(value, gram.rows)))
            # (With the Gram, so that no other gets its number.)
            self._factors[key] = gram, found
        return self._factors[key][1]
