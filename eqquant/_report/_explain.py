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
    - `problem`: what a kernel was looked for to do.
    - `kernel`: the name of the one that runs.
    - `error`: the bound that it declares on its error, relative to `|x| @ |w|`.
    - `provided`: what has to hold for that bound to. Empty if it holds for all inputs.
    - `about`: how it works.
    - `refused`: the names of those that were asked before it, and why they refused.

    All but `w` are `None` or empty if the blocks of `w` do not lie along an axis of its
    matrices. Then no kernel applies: `w` is dequantized, and multiplied as an ordinary
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
            yield Text("Before it were asked, and refused:")
        for name, reason in self.refused:
            text = Text.assemble((f"`{name}`", "bold"), f" {reason}.")
            yield Padding(text, (0, 0, 0, 2), expand=False)
        if self.kernel == "reference":
            yield Text(
                "The reference product is right for every format, and not made to be "
                "fast."
                + ("" if self.refused else " There is no other kernel for this.")
            )


def explain(
    x: Shaped[ArrayLike, "..."] | jax.ShapeDtypeStruct,
    w: QuantizedArray | Shaped[ArrayLike, "..."],
) -> Explanation:
    """Tells which kernel computes `x @ w` on the default backend, and why those before
    it do not. Nothing is computed.

    !!! Example

        ```python
        w = eqquant.quantize(w, "nf4")
        print(eqquant.explain(x, w))
        ```

    **Arguments:**

    - `x`: an array, traced or not, or a `jax.ShapeDtypeStruct`. Inside of `jax.vmap`
        this is one example, while the product is of all of them at once: ask about the
        whole batch.
    - `w`: a [`eqquant.QuantizedArray`][]. For `w @ x`, as of an `eqx.nn.Linear`, ask
        about `explain(x.T, w.T)`.

    **Returns:**

    An `Explanation`, which prints as sentences. Its fields say the same as data.

    **Raises:**

    A `TypeError` if `w` is not quantized or `x` is not an array. A `ValueError` if the
    shapes do not match.
    """
    if not isinstance(w, QuantizedArray):
        raise TypeError(
            "`w` should be a `QuantizedArray`: an ordinary product is computed by XLA. "
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
    refused = [(other.name, reason) for other, reason in refused]
    return Explanation(
        w, problem, kernel.name, kernel.error, kernel.provided, kernel.about, refused
    )


def _dense_product(w: QuantizedArray) -> str:
    nbytes = w.size * w.dtype.itemsize
    return (
        f"No kernel: the blocks of `w` lie along axis {w.axis}, which is not an axis "
        "of its matrices, so that no product of its packed codes applies. It is "
        f"dequantized to {short_array(w.shape, w.dtype.name)}, {short_bytes(nbytes)}, "
        "and multiplied as an ordinary array. Quantize with `axis=-2`, or -1, to keep "
        "it packed."
    )
