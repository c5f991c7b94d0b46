import equinox as eqx

from ...formats import AbstractFormat, as_format, FP8
from .._points import as_rounding
from .._stochastic import Stochastic


def _as_delayed(format: AbstractFormat | Stochastic | str):
    if not isinstance(format, Stochastic):
        format = as_rounding(as_format(format))
    bare = format.format if isinstance(format, Stochastic) else format
    wanted = "`format` should be one with one scale for a whole array: "
    if not isinstance(bare, FP8) or bare.scale != "tensor":
        raise ValueError(f"{wanted}`FP8(scale='tensor')`. Got {bare}.")
    if bare.scale_dtype == "float16":
        raise ValueError(
            "The scales of earlier steps are powers of two of any size: "
            "`scale_dtype` should be float32 or bfloat16. Got float16."
        )
    return format


class Delayed(eqx.Module):
    """Rounding with scales of earlier steps, which suit the largest absolute value of
    each operand in the last `history` steps. So an array can be rounded before its own
    largest value is known.

    - `format`: `FP8(scale="tensor")` with any `dtype`; or, in `backward`,
        [`eqquant.train.Stochastic`][] rounding to it.
    - `history`: the number of steps.

    The scale is the smallest power of two with which this value is within the format.
    Larger numbers saturate. Infinities and NaN become NaN. An operand without a history
    (in the first step, or if it was zero) gets its current scale; within `jax.vmap`,
    each mapped array has its own scale.

    [`eqquant.train.update_delayed`][] has to be called once in a step: it moves the
    largest values of the operands from the gradients to the weights.

    !!! Example

        ```python
        Delayed = eqquant.train.Delayed
        model = eqquant.train.tree_compute(
            model,
            forward=Delayed(eqquant.FP8(scale="tensor")),
            backward=Delayed(eqquant.FP8("e5m2", scale="tensor")),
        )
        ```

    **Raises:**

    A `ValueError` for a format with several scales, or with scales in float16; or if
    `history` is not a positive integer.

    ??? cite "Reference"

        FP8 Formats for Deep Learning. Micikevicius et al., 2022. Section 3.2.

        Transformer Engine. NVIDIA. (`DelayedScaling`, with the largest value of the
        history, no margin, and scales that are powers of two.)
    """

    format: AbstractFormat | Stochastic = eqx.field(static=True, converter=_as_delayed)
    history: int = eqx.field(default=16, static=True)

    def __check_init__(self):
        n = self.history
        if isinstance(n, bool) or not isinstance(n, int) or not 0 < n < 2**31:
            raise ValueError(
                f"`history` should be a positive number of steps. Got {n!r}."
            )
