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
    """`x @ w`, where either may be quantized, with a say in how it is computed.

    !!! Example

        ```python
        w = eqquant.quantize(w, "int8")
        y = eqquant.qmatmul(x, w, precision="highest")
        ```

    **Arguments:**

    - `x`, `w`: as of `jnp.matmul`. If both are quantized then `x` is dequantized; if
        neither is then this is `jnp.matmul`.
    - `kernel`: the name of the kernel to use: `"reference"`, or one of those that
        [`eqquant.explain`][] tells of. By default the first that applies.
    - `precision`: `"highest"` for those kernels only whose error is of the order of
        that of float32.

    **Returns:**

    The product, in the dtype of the operand that is not quantized. (That of the other,
    if this is an integer.) It is accumulated in float32.

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
            f"`kernel` is of products with a quantized array. Got {kernel!r}, and "
            "neither `x` nor `w` is quantized."
        )
    return jnp.matmul(x, w, precision=precision)
