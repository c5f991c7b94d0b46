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


# How many rows of a weight are rounded to measure the noise of a format.
_rows = 8


class Prediction(NamedTuple):
    """The predicted size and error of a weight in a format.

    - `bits`: bits per weight, scales included.
    - `error`: the increase of the loss, up to a factor that all weights share.
    """

    bits: float
    error: float


class Predictor:
    """Predicts the error of weights that GPTQ rounds, without rounding them.

    The loss increases by the mean over tokens of `(g . e x)^2`, up to a factor, where
    `e` is the error of the weight, `x` its input, and `g` the gradient at its outputs.
    The errors of rounding each column to its own target are independent, so this is
    their variance, times the squared gradient with respect to them. The variance is the
    noise of the format, times the mean square of the weight.
    """

    def __init__(self):
        self._means = {}

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
        # `GPTQ()` also searches for scales, so rounding to nearest would overestimate.
        search = ScaleSearch()
        by = search if search.applies(format) else None
        q = solved(some, format, by, axis=-1)
        total = lambda a: float(jnp.sum(jnp.square(a)))
        size = total(some)
        noise = 0.0 if size == 0 else total(q.dequantize() - some) / size
        square = total(rows) / (len(rows) * k)
        error = float(gradient) * noise * square * self._change(format, gram)
        return Prediction(bits, error)

    def _change(self, format, gram):
        # The squared gradient is of the errors that GPTQ leaves in the weight itself.
        # In a rotated weight, or without GPTQ, other errors are left.
        if gram is None or gram.is_diagonal:
            return 1.0
        plain = self._mean(gram, None)
        if plain == 0:
            return 1.0
        if not GPTQ().applies(format):
            return 1 / plain
        if not isinstance(format, Rotated):
            return 1.0
        return self._mean(gram, format) / plain

    def _mean(self, gram, rotated):
        rotation = None if rotated is None else (rotated.block, rotated.seed)
        key = id(gram.value), rotation
        if key not in self._means:
            value = gram.value
            if rotated is not None:
                value = rotated.rotate_gram(value, 2)
            found = float(np.mean(mean_of_factors(value, gram.rows)))
            # The Gram is kept alive, so that no other array gets its `id`.
            self._means[key] = gram, found
        return self._means[key][1]
