import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
from jaxtyping import ArrayLike, Shaped

from .._array import QuantizedArray
from ..kernels import choose, Problem
from ._text import plain, short_array, short_bytes
from ._uses import uses


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """How a product with a quantized array is computed. It prints as sentences.

    - `w`: the quantized array.
    - `problem`: the description of the product that kernels are chosen by.
    - `kernel`: the name of the kernel that runs.
    - `error`: the bound that the kernel declares on its error, relative to
        `|x| @ |w|`.
    - `provided`: the condition on the operands under which the bound holds. Empty if it
        holds for all of them.
    - `about`: how the kernel works.
    - `refused`: the names of the kernels that were considered before it, and why each
        does not apply.

    All but `w` are `None` or empty if the blocks of `w` do not lie along an axis of its
    matrices. Then no kernel applies: `w` is dequantized, and multiplied as a dense
    array.
    """

    w: QuantizedArray
    problem: Problem | None
    kernel: str | None
    error: float | None
    provided: str
    about: str
    refused: list[tuple[str, str]]

    def __repr__(self) -> str:
        return plain(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.padding import Padding
        from rich.text import Text

        if self.problem is None:
            yield Text(_dense_product(self.w))
            return
        yield Text.assemble(
            "The kernel ",
            (f"`{self.kernel}`", "bold"),
            f" computes the {self.problem}, from the packed codes. Its error is at "
            f"most {self.error:.0e} of |x| @ |w|"
            + (f", provided that {self.provided}." if self.provided else "."),
        )
        if self.about:
            yield Text(self.about)
        if self.refused:
            yield Text("Kernels considered first, and why they do not apply:")
        for name, reason in self.refused:
            text = Text.assemble((f"`{name}`", "bold"), f" {reason}.")
            yield Padding(text, (0, 0, 0, 2), expand=False)
        if self.kernel == "reference":
            yield Text(
                "The reference product is correct for every format, but not optimized."
                + ("" if self.refused else " There is no other kernel for this.")
            )


def explain(
    x: Shaped[ArrayLike, "..."] | jax.ShapeDtypeStruct,
    w: QuantizedArray | Shaped[ArrayLike, "..."],
) -> Explanation:
    """Explains which kernel computes `x @ w` on the default backend, and why others do
    not apply. Nothing is computed.

    !!! Example

        ```python
        w = eqquant.quantize(w, "nf4")
        print(eqquant.explain(x, w))
        ```

    **Arguments:**

    - `x`: an array, traced or not, or a `jax.ShapeDtypeStruct`. Inside `jax.vmap`, `x`
        is one example, but the product is computed for all of them at once: pass the
        whole batch instead.
    - `w`: a [`eqquant.QuantizedArray`][]. For `w @ x`, as in `eqx.nn.Linear`, call
        `explain(x.T, w.T)`.

    **Returns:**

    An `Explanation`, which prints as sentences. Its fields hold the same as data.

    **Raises:**

    A `TypeError` if `w` is not quantized or `x` is not an array. A `ValueError` if the
    shapes do not match.
    """
    if not isinstance(w, QuantizedArray):
        raise TypeError(
            "`w` should be a `QuantizedArray`: XLA computes products of dense arrays. "
            f"Got {type(w).__name__}."
        )
    if not (eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)):
        raise TypeError(
            "`x` should be an array or a `jax.ShapeDtypeStruct`. Got "
            f"{type(x).__name__}."
        )
    jaxpr = jax.make_jaxpr(operator.matmul)(x, w)
    found = uses(jaxpr.jaxpr, [frozenset()] * len(jaxpr.jaxpr.invars))
    problem = next((use.problem for use in found if use.problem is not None), None)
    if problem is None:
        return Explanation(w, None, None, None, "", "", [])
    kernel, refused = choose(problem)
    # (Some kernels are registered for several ranges of problems.)
    reasons = {other.name: reason for other, reason in refused}
    reasons.pop(kernel.name, None)
    return Explanation(
        w,
        problem,
        kernel.name,
        kernel.error,
        kernel.provided,
        kernel.about,
        [*reasons.items()],
    )


def _dense_product(w: QuantizedArray) -> str:
    nbytes = w.size * w.dtype.itemsize
    return (
        f"No kernel applies: the blocks of `w` lie along axis {w.axis}, which is not "
        "an axis of its matrices. `w` is dequantized to "
        f"{short_array(w.shape, w.dtype.name)}, {short_bytes(nbytes)}, and multiplied "
        "as a dense array. Quantize it with `axis=-2` or -1 to keep it packed."
    )
