import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, Shaped

from .._array import left_matmul, matmul, QuantizedArray


precisions = ("default", "high", "highest")


def qmatmul(
    x: QuantizedArray | Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    w: QuantizedArray | Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    *,
    kernel: str | None = None,
    precision: str | lax.Precision | None = None,
) -> Inexact[Array, "..."]:
    """Computes `x @ w`, where either operand may be quantized, with a choice of the
    kernel.

    !!! Example

        ```python
        w = eqquant.quantize(w, "int8")
        y = eqquant.qmatmul(x, w, precision="highest")
        ```

    **Arguments:**

    - `x`, `w`: as in `jnp.matmul`. If both are quantized, `x` is dequantized; if
        neither is, this is `jnp.matmul`.
    - `kernel`: the name of a kernel: `"reference"`, or one that [`eqquant.explain`][]
        lists. By default the first that applies.
    - `precision`: `"highest"` allows only kernels with an error bound of `1e-5`.

    **Returns:**

    The product, in the dtype of the dense operand. (In the dtype of the quantized one,
    if the dense one is an integer.) It is accumulated in float32.

    **Raises:**

    A `ValueError` if the shapes do not match, or if the kernel does not apply.
    """
    if isinstance(precision, lax.Precision):
        precision = precision.name.lower()
    if precision is not None and precision not in precisions:
        raise ValueError(
            f"`precision` should be one of {precisions}, or None. Got {precision!r}."
        )
    if isinstance(w, QuantizedArray):
        x = x.dequantize() if isinstance(x, QuantizedArray) else jnp.asarray(x)
        return matmul(x, w, kernel, precision)
    w = jnp.asarray(w)
    if isinstance(x, QuantizedArray):
        return left_matmul(x, w, kernel, precision)
    if kernel is not None:
        raise ValueError(
            f"`kernel` should be None if neither `x` nor `w` is quantized. Got "
            f"{kernel!r}."
        )
    return jnp.matmul(x, w, precision=precision)
