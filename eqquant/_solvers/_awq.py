from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._array import check_number
from ._method import AbstractMethod
from ._scale_search import ScaleSearch


class AWQ(AbstractMethod):
    """Scales the channels of a weight before rounding it, so that channels with large
    inputs lose less. The inputs are divided by the same scales at no cost:
    `eqquant.tree_quantize` scales channels only where `eqquant.calibrate` has proved
    that an earlier array, such as the weight of a norm or the rows of the previous
    matrix, can absorb the scales. This also changes arrays that are not quantized, so
    the model must be called in the same way as during calibration.

    The scales are powers of the root mean square of each input. The power is searched
    for with `ScaleSearch`, jointly for all weights that share the inputs.

    - `tries`: the number of powers to try besides 0, evenly spaced up to 1.
    - `then`: the method that rounds the weights, whether their channels could be scaled
      or not.

    !!! Example

        ```python
        stats = eqquant.calibrate(fn, model, batches)
        model = eqquant.tree_quantize(model, "int4", stats=stats, method=eqquant.AWQ())
        ```

    ??? cite "Reference"

        AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration.
        Lin et al., 2024.
    """

    tries: int = eqx.field(default=10, static=True)
    then: AbstractMethod = eqx.field(default=ScaleSearch(), static=True)
    needs_gram: ClassVar[bool] = True

    def __check_init__(self):
        check_number("tries", self.tries, whole=True)
        if self.tries < 1:
            raise ValueError(f"`tries` should be at least 1. Got {self.tries}.")
        if not isinstance(self.then, AbstractMethod) or isinstance(self.then, AWQ):
            raise ValueError(
                "`then` should be a method such as `ScaleSearch()` or `GPTQ()`. Got "
                f"{self.then}."
            )

    def applies(self, format):
        return self.then.applies(format)

    def candidates(
        self, diagonal: Float[Array, "*steps k"]
    ) -> list[Float[Array, "*steps k"]]:
        """The scales to try. The first candidate is all ones.

        **Arguments:**

        - `diagonal`: the sum of the squares of each input.
        """
        size = jnp.sqrt(diagonal.astype(jnp.float32))
        # No scale should be zero, so inputs that are always zero count as the largest.
        size = jnp.where(size > 0, size, jnp.max(size, axis=-1, keepdims=True))
        log = jnp.log(jnp.where(size > 0, size, 1))
        ends = jnp.max(log, -1, keepdims=True), jnp.min(log, -1, keepdims=True)
        middle = sum(ends) / 2
        powers = [i / self.tries for i in range(self.tries + 1)]
        return [jnp.exp(power * (log - middle)) for power in powers]

    def choose(self, w, format, gram, rows, parameters):
        return self.then.choose(w, format, gram, rows, parameters)

    def losses(self, error, gram):
        return self.then.losses(error, gram)
