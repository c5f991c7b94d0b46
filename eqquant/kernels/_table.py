import dataclasses
import functools as ft
import inspect
from collections.abc import Callable
from typing import get_args, NamedTuple

import jax
from jaxtyping import Array, Float

from ..formats import AbstractComposite, AbstractFormat, Stored
from ._problem import Problem, Product
from ._reference import reference
from .cpu._tuning import fuses


platforms = ("cpu", "cuda", "rocm", "tpu")


class Kernel(NamedTuple):
    """A way to compute a product.

    - `name`: of the function, for `eqquant.explain` and `qmatmul(..., kernel=...)`.
    - `fn`: `(x, stored, problem) -> y`.
    - `supports`: `None` for a problem that it can do, or a sentence that says why not.
    - `error`: a bound on its error, relative to `|x| |W|`.
    - `provided`: what has to hold for the bound to. Nothing, if this is empty.
    """

    name: str
    fn: Callable[[Float[Array, "m _"], Stored, Problem], Float[Array, "m _"]]
    supports: Callable[[Problem], str | None]
    error: float
    provided: str = ""

    @property
    def about(self) -> str:
        """How it works: the first paragraph of the function's docstring."""
        return (inspect.getdoc(self.fn) or "").split("\n\n")[0].replace("\n", " ")


class Choice(NamedTuple):
    """The kernel for a problem, and those that were refused before it, with reasons."""

    kernel: Kernel
    refused: list[tuple[Kernel, str]]


class _Key(NamedTuple):
    product: Product
    format_type: type[AbstractFormat]
    platform: str
    activation: type[AbstractFormat] | None
    priority: float


_reference = Kernel("reference", reference, lambda problem: None, 1e-5)
_table: dict[_Key, Kernel] = {}
_chosen: set[str] = set()


def register_kernel(
    product: Product,
    format_type: type[AbstractFormat],
    platform: str = "cpu",
    activation: type[AbstractFormat] | None = None,
    priority: int | float = 0,
    supports: Callable[[Problem], str | None] = lambda problem: None,
    error: float = 1e-5,
    provided: str = "",
) -> Callable[[Callable], Callable]:
    """Enters a kernel into the table that every product of a quantized array goes
    through. Used as a decorator of a function `(x, stored, problem) -> y`, in which
    `stored` is what the format's `encode` gave, in the layout that the format asks for:
    `problem.decode(stored)` is the weight.

    The kernels for a format, and for the classes it inherits from, are tried in order:
    the more specific class first, then the higher priority. The reference product is
    the last of them, always.

    **Arguments:**

    - `product`: `"matmul"` for `y[m, n] = x[m, k] @ W[n, k].T`, or
        `"matmul_transposed"` for `y[m, k] = x[m, n] @ W[n, k]`.
    - `format_type`: the class of formats whose stored arrays it reads.
    - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
    - `activation`: the class of formats that it quantizes `x` in. `None` if it leaves
        `x` as it is.
    - `priority`: the highest is tried first.
    - `supports`: called with a `Problem`. Should return `None` if the kernel can do it,
        or a sentence that says why not: `"needs a multiple of 8 rows, got 3"`.
    - `error`: a bound on the error of each number of `y`, against the product with the
        decoded weight, relative to the product of absolute values `|x| |W|`. (Rounding
        `y` to a narrow dtype comes on top, and numbers below the smallest normal one
        may count as zeros.) Kernels above `1e-5` are passed over where
        `precision="highest"` is asked for. What is not finite should come out as of the
        decoded weight.
    - `provided`: what has to hold of the operands for that bound to, as in a sentence:
        `"the weights are on average no smaller where the inputs are larger"`. By
        default it holds for all of them.

    **Returns:**

    A decorator, which returns the function as it is.

    **Raises:**

    A `ValueError` or `TypeError` for an argument that is not as above, and if there is
    a kernel already that the choice would be ambiguous with.
    """
    if product not in get_args(Product):
        raise ValueError(
            f"`product` should be one of {get_args(Product)}. Got {product!r}."
        )
    if platform not in platforms:
        raise ValueError(f"`platform` should be one of {platforms}. Got {platform!r}.")
    _check_format_type("format_type", format_type)
    if activation is not None:
        _check_format_type("activation", activation)
    key = _Key(product, format_type, platform, activation, priority)

    def register(fn):
        if key in _table:
            raise ValueError(
                f"The choice between the kernels {fn.__name__!r} and "
                f"{_table[key].name!r} is ambiguous: both are for {product!r} of "
                f"{format_type.__name__} on {platform!r} with `priority={priority}`. "
                "Pass another `priority`."
            )
        _table[key] = Kernel(fn.__name__, fn, supports, error, provided)
        if platform in _chosen:
            # Programs that were compiled before hold choices that may now be others.
            jax.clear_caches()
        return fn

    return register


def choose(problem: Problem, name: str | None = None) -> Choice:
    """Looks up the kernel for a problem.

    **Arguments:**

    - `problem`: what is to be computed.
    - `name`: the name of the kernel to use. By default the first that supports it.

    **Raises:**

    A `ValueError` if there is no kernel of that name, or if it refuses.
    """
    _chosen.add(problem.platform)
    kernels = [*_candidates(problem), _reference]
    if name is not None:
        names = [kernel.name for kernel in kernels]
        if name not in names:
            raise ValueError(
                f"`kernel` should be one of {names}, for the {problem}. Got {name!r}."
            )
        kernels = [kernel for kernel in kernels if kernel.name == name]
    refused = []
    for kernel in kernels:
        reason = _refusal(kernel, problem)
        if reason is None:
            return Choice(kernel, refused)
        refused.append((kernel, reason))
    raise ValueError(
        f"The kernel {name!r} cannot do the {problem}: it {refused[0][1]}."
    )


def _candidates(problem: Problem) -> list[Kernel]:
    found = {
        key: kernel
        for key, kernel in _table.items()
        if key.product == problem.product
        and key.platform == problem.platform
        and isinstance(problem.format, key.format_type)
        and isinstance(problem.activation, key.activation or type(None))
    }

    def rank(key):
        distance = type(problem.format).__mro__.index(key.format_type)
        if key.activation is None:
            return distance, 0, -key.priority
        steps = type(problem.activation).__mro__.index(key.activation)
        return distance, steps, -key.priority

    kernels = [found[key] for key in sorted(found, key=rank)]
    if isinstance(problem.format, AbstractComposite):
        return [*kernels, *map(_of_composite, _candidates(_of_base(problem)))]
    return kernels


# The kernels of a format are also those of a composite one that has its codes.


def _of_base(problem):
    layout = dataclasses.replace(problem.layout, format=problem.format.base)
    return dataclasses.replace(problem, layout=layout)


def _of_composite(kernel):
    @ft.wraps(kernel.fn)
    def fn(x, stored, problem):
        layout = problem.layout
        flat = layout.format.flat(layout.to_rows(stored), layout.tail)
        return kernel.fn(x, layout.from_rows(flat), _of_base(problem))

    def supports(problem):
        if problem.platform == "cpu" and not fuses and problem.rows not in range(32):
            # XLA would hold all scales in memory several times; and the reference is as
            # fast.
            return "is for composite scales and many rows only from JAX 0.11 on"
        return kernel.supports(_of_base(problem))

    return kernel._replace(fn=fn, supports=supports)


def _refusal(kernel: Kernel, problem: Problem) -> str | None:
    if problem.highest and kernel.error > 1e-5:
        return (
            f"has errors up to {kernel.error:.0e}, too many for `precision='highest'`"
        )
    return kernel.supports(problem)


def _check_format_type(name, cls):
    if not (isinstance(cls, type) and issubclass(cls, AbstractFormat)):
        raise TypeError(f"`{name}` should be a class of formats. Got {cls!r}.")
