from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._method import AbstractMethod
from ._scale_search import ScaleSearch


class AWQ(AbstractMethod):
    """Scales the channels of a weight before it is rounded, so that those whose inputs
    are large lose less. The inputs are divided by the same scales, and that costs
    nothing: `eqquant.tree_quantize` does so only where `eqquant.calibrate` has proved
    that an array before, such as the weight of a norm or the rows of the matrix before,
    can take them. So other arrays of the model change than those that are quantized,
    and the model has to be used as by the function that it was calibrated with.

    The scales are powers of the root mean square of each input. The power is searched
    for, with `ScaleSearch`, for all weights that share the inputs.

    - `tries`: how many powers between 0 and 1 are tried.
    - `then`: the method that rounds the scaled weights, and those whose inputs cannot
      be scaled.

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
        """The scales to try, of which the first are one.

        **Arguments:**

        - `diagonal`: the sum of squares of each input.
        """
        size = jnp.sqrt(diagonal.astype(jnp.float32))
        # (Inputs that were zero in all rows are as others.)
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
