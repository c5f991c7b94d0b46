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


platforms = ("cpu", "cuda", "rocm", "tpu")


class Kernel(NamedTuple):
    """A way to compute a product.

    - `name`: the name of the function, for `eqquant.explain` and
      `qmatmul(..., kernel=...)`.
    - `fn`: `(x, stored, problem) -> y`.
    - `supports`: `None` for a problem that the kernel applies to, or the reason why it
      does not apply.
    - `error`: a bound on its error, relative to `|x| |W|`.
    - `provided`: the condition under which the bound holds. Empty if it always holds.
    """

    name: str
    fn: Callable[[Float[Array, "m _"], Stored, Problem], Float[Array, "m _"]]
    supports: Callable[[Problem], str | None]
    error: float
    provided: str = ""

    @property
    def about(self) -> str:
        """How the kernel works: the first paragraph of its function's docstring."""
        return (inspect.getdoc(self.fn) or "").split("\n\n")[0].replace("\n", " ")


class Choice(NamedTuple):
    """The kernel for a problem, and the kernels that were considered first, each with
    the reason why it does not apply."""

    kernel: Kernel
    refused: list[tuple[Kernel, str]]


class _Key(NamedTuple):
    product: Product
    format_type: type[AbstractFormat]
    platform: str
    activation: type[AbstractFormat] | None
    priority: float


# Not in the table: it applies to every problem, after all kernels that are.
_reference = Kernel("reference", reference, lambda problem: None, 1e-5)
_table: dict[_Key, Kernel] = {}
# The platforms for which a kernel has been chosen, so that programs hold that choice.
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
    """Enters a kernel into the dispatch table of quantized products. Decorates a
    function `(x, stored, problem) -> y`, where `stored` holds the arrays that the
    format's `encode` returned, in the layout `problem.layout`: `problem.decode(stored)`
    is the weight.

    The kernels for a format and for its base classes are tried in order: more specific
    classes first, then higher priorities. The reference product is always the last.

    !!! Example

        ```python
        def few_rows(problem):
            return None if problem.rows == 1 else "is for one row"

        @eqquant.register_kernel("matmul", eqquant.NF4, priority=99, supports=few_rows)
        def my_kernel(x, stored, problem):
            return (x @ problem.decode(stored).T).astype(x.dtype)
        ```

    **Arguments:**

    - `product`: `"matmul"` for `y[m, n] = x[m, k] @ W[n, k].T`, or
        `"matmul_transposed"` for `y[m, k] = x[m, n] @ W[n, k]`.
    - `format_type`: the class of formats whose stored arrays the kernel reads.
    - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
    - `activation`: the class of formats in which the kernel quantizes `x`. `None` for a
        weight-only kernel.
    - `priority`: kernels with higher priorities are tried first.
    - `supports`: called with a [`eqquant.Problem`][]. Returns `None` if the kernel
        applies, or the reason why it does not: `"needs a multiple of 8 rows, got 3"`.
    - `error`: a bound on the error of each element of `y` against the product with the
        decoded weight, relative to the product of absolute values `|x| |W|`. (Rounding
        `y` to a narrow dtype comes on top, and subnormal numbers may be flushed to
        zero.) With `precision="highest"`, kernels whose bound is above `1e-5` are
        skipped. Infinities and NaNs should come out as in the product with the decoded
        weight.
    - `provided`: the condition on the operands under which the bound holds:
        `"the weights are on average no smaller where the inputs are larger"`. By
        default it always holds.

    **Returns:**

    A decorator that returns the function unchanged.

    **Raises:**

    A `TypeError` if `format_type` or `activation` is not a class of formats. A
    `ValueError` for an unknown `product` or `platform`, and if another kernel has the
    same key and `priority`, since the choice between them would be ambiguous.
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
            # Programs compiled so far may hold a choice that this kernel changes.
            jax.clear_caches()
        return fn

    return register


def choose(problem: Problem, name: str | None = None) -> Choice:
    """Looks up the kernel for a problem.

    **Arguments:**

    - `problem`: the product to compute.
    - `name`: the name of the kernel to use. By default, the first kernel that supports
        the problem.

    **Raises:**

    A `ValueError` if no kernel has that name, or if it does not support the problem.
    """
    _chosen.add(problem.platform)
    kernels = [*_candidates(problem), _reference]
    if problem.layout.panels:
        kernels = _of_rows_in_panels(kernels)
    if name is not None:
        names = list(dict.fromkeys(kernel.name for kernel in kernels))
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
        # A kernel may be tried twice: as the fastest, and as one that does it, too.
        if (kernel.name, reason) not in [(k.name, why) for k, why in refused]:
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

    # The nearer a class in the method resolution order, the more specific it is. The
    # class of the format decides first, then that of the activation, then the priority.
    def rank(key):
        distance = type(problem.format).__mro__.index(key.format_type)
        if key.activation is None:
            return distance, 0, -key.priority
        steps = type(problem.activation).__mro__.index(key.activation)
        return distance, steps, -key.priority

    # A kernel for a class and for one that it inherits from is tried once.
    kernels = list(dict.fromkeys(found[key] for key in sorted(found, key=rank)))
    if isinstance(problem.format, AbstractComposite):
        return [*kernels, *map(_of_composite, _candidates(of_base(problem)))]
    return kernels


# A composite format has the codes of its base, and so it has the kernels of its base.
# Most run on the scales that `flat` computes; these read scales of one byte as they are
# stored.
_of_bytes: set[Callable] = set()


def reads_byte_scales(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Declares that a kernel for grids reads scales as `problem.byte_scales` says."""
    _of_bytes.add(fn)
    return fn


# Rows in panels are for these. All others get rows that lie side by side.
_of_panels: set[Callable] = set()


def reads_panels(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Declares that a kernel reads rows in panels, too: see `Layout`."""
    _of_panels.add(inspect.unwrap(fn))
    return fn


def of_base(problem: Problem) -> Problem:
    """The same product with the codes of a composite format, as those of its base."""
    assert isinstance(problem.format, AbstractComposite)
    layout = dataclasses.replace(problem.layout, format=problem.format.base)
    return dataclasses.replace(problem, layout=layout, composite=True)


def on_base(fn: Callable[..., Array]) -> Callable[..., Array]:
    """A kernel for a composite format, of one for its base."""

    @ft.wraps(fn)
    def of_composite(
        x: Float[Array, "m _"], stored: Stored, problem: Problem
    ) -> Float[Array, "m _"]:
        base, format = of_base(problem), problem.format
        assert isinstance(format, AbstractComposite)
        scales = format.byte_scales(stored) if fn in _of_bytes else None
        if scales is not None:
            return fn(x, stored, dataclasses.replace(base, byte_scales=scales))
        return fn(x, _flat(stored, problem), base)

    return of_composite


def _of_composite(kernel):
    supports = lambda problem: kernel.supports(of_base(problem))
    return kernel._replace(fn=on_base(kernel.fn), supports=supports)


def _of_rows_in_panels(kernels):
    # Those that read panels come first.
    reads = [k for k in kernels if inspect.unwrap(k.fn) in _of_panels]
    return [*reads, *map(_of_rows_side_by_side, kernels)]


def _of_rows_side_by_side(kernel):
    def plain(problem):
        layout = problem.layout.side_by_side
        return dataclasses.replace(problem, layout=layout)

    @ft.wraps(kernel.fn)
    def fn(x, stored, problem):
        stored = problem.layout.without_panels(stored)
        return kernel.fn(x, stored, plain(problem))

    about = inspect.getdoc(kernel.fn) or ""
    fn.__doc__ = f"Lays the rows of the weight side by side first. {about}".strip()
    supports = lambda problem: kernel.supports(plain(problem))
    return kernel._replace(fn=fn, supports=supports)


def _flat(stored, problem):
    layout, format = problem.layout, problem.format
    if format.by_element:
        # (From swapped axes and back, XLA would write transposed copies.)
        return format.flat(stored, layout.tail)
    return layout.from_rows(format.flat(layout.to_rows(stored), layout.tail))


def _refusal(kernel: Kernel, problem: Problem) -> str | None:
    if problem.highest and kernel.error > 1e-5:
        return (
            f"has errors up to {kernel.error:.0e}, too large for `precision='highest'`"
        )
    return kernel.supports(problem)


def _check_format_type(name, cls):
    if not (isinstance(cls, type) and issubclass(cls, AbstractFormat)):
        raise TypeError(f"`{name}` should be a class of formats. Got {cls!r}.")
