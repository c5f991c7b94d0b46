import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
from jaxtyping import ArrayLike, Shaped

from .._array import QuantizedArray
from ..formats import EXL3, Rotated
from ..kernels import choose, measured_machine, Problem
from ._text import plain, short_array, short_bytes
from ._uses import uses


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """How a product with a quantized array is computed. It prints as sentences.

    - `w`: the quantized array.
    - `problem`: the description of the product, by which kernels are chosen.
    - `kernel`: the name of the kernel that runs.
    - `error`: the bound that the kernel declares on its error for this product,
        relative to `|x| @ |w|`.
    - `provided`: the condition on the operands under which the bound holds. Empty if it
        always holds.
    - `about`: how the kernel works.
    - `seconds`: the predicted times on one core of the kernels that can compute it, by
        name, beginning with the kernel that runs. Empty if they were not measured.
    - `measured`: the machine on which these times were measured.
    - `exported`: the name of the kernel in a program that `jax.export` writes.
        (Programs that [`eqquant.export`][] writes run `kernel`.)
    - `refused`: the names of the kernels that do not apply, or whose times were not
        measured, and why.

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
    seconds: dict[str, float]
    measured: str
    exported: str | None
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
        if isinstance(self.w.format, Rotated):
            along = self.problem.product == "matmul"
            what = "x is rotated first" if along else "The product is rotated back"
            yield Text(
                f"{what}, as {self.w.format} asks. The error is relative to the "
                "rotated operands."
            )
        if isinstance(self.w.format, EXL3):
            yield Text(
                f"x is scaled and rotated first, and the product after, as "
                f"{self.w.format} asks. The error is relative to the rotated operands."
            )
        if self.about:
            yield Text(self.about)
        if len(self.seconds) > 1:
            times = [f"`{name}` {_short_time(s)}" for name, s in self.seconds.items()]
            yield Text(
                f"Predicted times on one core: {', '.join(times)}, from measurements "
                f"on {self.measured}."
            )
        if self.exported != self.kernel:
            yield Text(
                f"In a program of `jax.export`, `{self.exported}` runs instead; in one "
                f"of `eqquant.export`, `{self.kernel}`."
            )
        if self.refused:
            yield Text("Kernels that do not apply, and why:")
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
    found = uses(jaxpr, [frozenset()] * len(jaxpr.in_avals))
    problem = next((use.problem for use in found if use.problem is not None), None)
    if problem is None:
        return Explanation(w, None, None, None, "", "", {}, "", None, [])
    kernel, refused, others = choose(problem)
    # (A kernel may be listed twice: for panels, and for rows that are laid side by
    # side.)
    able = {other.name: other for other in [*others[::-1], kernel]}
    seconds = {
        other.name: other.seconds(problem)
        for other in [kernel, *others]
        if other.seconds is not None and able[other.name] is other
    }
    reasons = {other.name: why for other, why in refused if other.name not in able}
    unmeasured = [name for name, s in seconds.items() if s == math.inf]
    for name in unmeasured:
        del seconds[name]
        if name != kernel.name:
            reasons[name] = "was not measured, so it runs only if `kernel=` names it"
    return Explanation(
        w,
        problem,
        kernel.name,
        kernel.bound(problem),
        kernel.provided,
        kernel.about,
        seconds,
        measured_machine(problem.format).name
        if seconds and problem.platform == "cpu"
        else "",
        choose(dataclasses.replace(problem, portable=True)).kernel.name,
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


def _short_time(seconds: float) -> str:
    unit, size = next(
        (unit, size)
        for unit, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6))
        if seconds >= size or unit == "µs"
    )
    return f"{float(f'{seconds / size:.2g}'):g} {unit}"
