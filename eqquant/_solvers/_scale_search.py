from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._array import check_number
from ._gram import damped, diagonal, filled, normalised
from ._method import AbstractMethod, squared_losses
from ._rounding import in_blocks, Rounding
from ._search import Search


class ScaleSearch(AbstractMethod):
    """Rounds to nearest, after searching for the scale and offset of each block that
    minimise its sum of squared errors. The best candidate is then refined by least
    squares. With a Gram matrix, each squared error is weighted by the mean square of
    the input that it is multiplied with.

    - `damping`: added to these mean squares, in units of their mean.

    !!! Example

        ```python
        stats = eqquant.calibrate(fn, model, batches)
        model = eqquant.tree_quantize(
            model, "int4", stats=stats, method=eqquant.ScaleSearch()
        )
        ```
    """

    damping: float = eqx.field(default=0.01, static=True)
    needs_gram: ClassVar[bool] = False

    def __check_init__(self):
        check_number("damping", self.damping)
        if self.damping < 0:
            raise ValueError(f"`damping` should not be negative. Got {self.damping}.")

    def choose(self, w, format, gram, rows, parameters):
        rounding = Rounding(format)
        blocks = in_blocks(w, format)
        _, number, size = blocks.shape
        if parameters is None:
            if gram is None:
                weights = jnp.ones_like(w[0])
            else:
                weights = damped(diagonal(normalised(gram)), rows, self.damping)
            weights = filled(weights, number * size).reshape(1, number, size)
            columns, weights = (jnp.moveaxis(a, -1, 0) for a in (blocks, weights))
            found = Search(rounding, columns, weights).best()
            parameters = jtu.tree_map(lambda a: a[0, ..., None], found)
        return rounding.codes(blocks, parameters), parameters

    def losses(self, error, gram):
        return squared_losses(error, None if gram is None else diagonal(gram))
