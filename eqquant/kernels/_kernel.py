import inspect
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from ..formats import Stored
from ._problem import Problem


class Kernel(NamedTuple):
    """A way to compute a product.

    - `name`: the name of the function, for `eqquant.explain` and
      `qmatmul(..., kernel=...)`.
    - `fn`: `(x, stored, problem) -> y`.
    - `supports`: `None` for a problem that the kernel can compute, or the reason why it
      cannot.
    - `error`: a bound on its error, relative to `|x| |W|`, for sums of up to 128 terms;
        or a function that returns such a bound for a problem.
    - `provided`: the condition under which the bound holds. Empty if it always holds.
    - `any_length`: whether the bound holds for sums of any number of terms.
    - `seconds`: predicts how long the kernel takes for a problem that it supports.
        `None` if it was not measured.
    - `reads_panels`: whether it reads rows in panels, too.
    """

    name: str
    fn: Callable[[Float[Array, "m _"], Stored, Problem], Float[Array, "m _"]]
    supports: Callable[[Problem], str | None]
    error: float | Callable[[Problem], float]
    provided: str = ""
    any_length: bool = False
    seconds: Callable[[Problem], float] | None = None
    reads_panels: bool = False

    def short_bound(self, problem: Problem) -> float:
        """A bound on its error for a problem with sums of up to 128 terms."""
        return self.error(problem) if callable(self.error) else self.error

    def bound(self, problem: Problem) -> float:
        """A bound on its error for a problem. Each further term of a sum in float32 may
        be rounded by another part in `2**24` of the sum."""
        further = 0 if self.any_length else max(0, problem.terms - 128)
        return self.short_bound(problem) + further * 2.0**-24

    @property
    def about(self) -> str:
        """How the kernel works: the first paragraph of its function's docstring."""
        return (inspect.getdoc(self.fn) or "").split("\n\n")[0].replace("\n", " ")
