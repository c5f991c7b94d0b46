from typing import NamedTuple, TYPE_CHECKING

from jaxtyping import Array, Int, PyTree

from ...formats import Dynamic8
from ._moments import Moment, Scalar, Size, Storage, unbiased
from ._quantized_state import quantized_state


if TYPE_CHECKING:
    import optax


class Ema8bitState(NamedTuple):
    """The step count, and the running mean of each parameter's updates."""

    count: Int[Array, ""]
    ema: PyTree[Moment]


def ema8bit(
    decay: Scalar,
    debias: bool = True,
    *,
    block_size: Size = 256,
    filter_spec: PyTree = True,
    min_size: Size = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.ema` with a state of one byte per parameter instead of four. The running
    mean is flattened and stored in [`eqquant.Dynamic8`][] with dithered rounding.

    It can also be the momentum of other optimizers.

    !!! Example

        ```python
        # Like `optax.adafactor(1e-3, momentum=0.9)`.
        adafactor = optax.chain(
            optax.adafactor(1e-3), eqquant.train.ema8bit(0.9, debias=False)
        )
        # Like `optax.sgd(0.1, momentum=0.9)`, which adds updates up.
        sgd = optax.chain(
            eqquant.train.ema8bit(0.9, debias=False), optax.sgd(0.1 / (1 - 0.9))
        )
        ```

    **Arguments:**

    - `decay`, `debias`: as in `optax.ema`.
    - `block_size`, `filter_spec`, `min_size`, `embeddings`: as in
        [`eqquant.train.scale_by_adam8bit`][].

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    A `ModuleNotFoundError` if optax is not installed. `init` raises a `ValueError` for
    complex parameters: wrap the optimizer in `optax.contrib.split_real_and_imaginary`.

    ??? cite "Reference"

        8-bit Optimizers via Block-wise Quantization. Dettmers et al., 2022.
    """
    storage = Storage(Dynamic8, block_size, filter_spec, min_size, embeddings)
    options = (decay, 1 - decay)
    return quantized_state(_one, options, Ema8bitState, storage, (True,), (debias,))


def _one(debias, options, g, m):
    t, decay, rest = options
    m = decay * m + rest * g
    return unbiased(m, g, t, decay, rest, nesterov=False) if debias else m, m
