import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Shaped

from ..._implicit import implicit
from ...formats import AbstractFormat, Int8
from ._checked import as_roundings, Backward
from ._product import Roundings
from ._rounded_dot import DotDimensionNumbers, is_rounded, rounded_dot
from ._weight import is_low_precision, LowPrecision, plain


class DotGeneral(eqx.Module):
    """`jax.lax.dot_general` in fewer bits, as a value: in the forward pass, both
    operands are rounded; in the backward pass, the cotangent. Pass it wherever a
    function takes a `dot_general`: in `jnp.einsum(..., _dot_general=...)`, and in the
    layers of Flax.

    [`eqquant.train.tree_compute`][] does this for products with weights. Use this for
    other products, such as those of attention.

    !!! Example

        ```python
        dot_general = eqquant.train.DotGeneral("int8", "int8")
        scores = jnp.einsum("qhd,khd->hqk", q, k, _dot_general=dot_general)

        attention = dot_general.within(jax.nn.dot_product_attention)
        y = attention(q, k, v)
        ```

    **Arguments:**

    - `forward`, `backward`: as in [`eqquant.train.tree_compute`][]. A pair for
        `backward` is for the gradients of the first operand, and of the second.

    **Raises:**

    The errors of [`eqquant.train.tree_compute`][] for `forward` and `backward`.

    ??? cite "Reference"

        Pareto-Optimal Quantized ResNet Is Mostly 4-bit. Abdolrashidi et al., 2021. (Its
        library AQT injects such a `dot_general` into layers.)
    """

    roundings: Roundings

    def __init__(
        self,
        forward: AbstractFormat | str = Int8(),
        backward: Backward | tuple[Backward, Backward] = None,
    ):
        self.roundings = as_roundings(forward, backward)

    def __call__(
        self,
        lhs: Shaped[Array, "..."],
        rhs: Shaped[Array, "..."],
        dimension_numbers: DotDimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> Shaped[Array, "..."]:
        """**Arguments:**

        - As in `jax.lax.dot_general`. `precision` has no effect on rounded products,
            and `out_sharding` should be `None`.

        **Returns:**

        The product, in the dtype of `jax.lax.dot_general`. Products that contract
        nothing, or that are not of real floating-point numbers, are not rounded.

        **Raises:**

        The errors of `jax.lax.dot_general`, and a `ValueError` for an `out_sharding`.
        """
        if out_sharding is not None:
            raise ValueError(
                "`out_sharding` should be `None` for products in fewer bits: their "
                "sharding follows from the operands. Got "
                f"{out_sharding}: apply `jax.sharding.reshard` to the result."
            )
        exact = ft.partial(
            lax.dot_general,
            dimension_numbers=dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
        dtype = jax.eval_shape(exact, lhs, rhs).dtype
        if not is_rounded(dimension_numbers, dtype):
            return exact(lhs, rhs)
        lhs, rhs = (jnp.asarray(a) for a in (lhs, rhs))
        return rounded_dot(lhs, rhs, dimension_numbers, self.roundings, dtype)

    def within(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Transforms a function without an argument `dot_general`, such as
        `jax.nn.dot_product_attention`, so that its products have fewer bits: all
        products and convolutions one of whose operands is an argument of the function,
        or a transpose, a reshape or a part of an argument. (For a pair in `backward`,
        this is the second operand, unless both are.)

        **Arguments:**

        - `fn`: a function that JAX can trace.

        **Returns:**

        A function of the same arguments, which runs through [`eqquant.implicit`][].
        """

        @ft.wraps(fn)
        def call(*args, **kwargs):
            args, kwargs = jtu.tree_map(self._marked, (args, kwargs))
            out = implicit(fn)(*args, **kwargs)
            return jtu.tree_map(plain, out, is_leaf=is_low_precision)

        return call

    def _marked(self, x):
        is_float = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
        if not is_float or x.ndim == 0:
            return x
        return LowPrecision(jnp.asarray(x), None, None, self.roundings)
