import functools as ft
import os
from collections.abc import Callable
from typing import Any, get_args, NamedTuple, TypeAlias

import jax

from ..formats import AbstractComposite, AbstractFormat
from ._adapted import is_for_panels, of_base, of_composite_format, of_rows_in_panels
from ._kernel import Kernel
from ._problem import Problem, Product
from ._reference import reference


platforms = ("cpu", "cuda", "rocm", "tpu")


class Choice(NamedTuple):
    """The kernel for a problem.

    - `kernel`: the kernel.
    - `refused`: the kernels that were tried with or before this one and cannot compute
        the product, each with the reason.
    - `others`: the other kernels that were tried with this one and can compute it.
    """

    kernel: Kernel
    refused: list[tuple[Kernel, str]]
    others: list[Kernel]


_Activation: TypeAlias = type[AbstractFormat] | None


class _Entry(NamedTuple):
    # The products, formats, platforms and activations of the kernel.
    products: tuple[Product, ...]
    formats: tuple[type[AbstractFormat], ...]
    platforms: tuple[str, ...]
    activations: tuple[type, ...]  # `type(None)` for weight-only kernels
    priority: float


# Not in the table: it is the last choice for every problem.
_reference = Kernel("reference", reference, lambda problem: None, 1e-5)
_table: list[tuple[_Entry, Kernel]] = []
# The platforms for which a kernel was chosen, so that compiled programs contain the
# choice.
_chosen: set[str] = set()


def register_kernel(
    product: Product | tuple[Product, ...],
    format_type: type[AbstractFormat] | tuple[type[AbstractFormat], ...],
    platform: str | tuple[str, ...] = "cpu",
    activation: _Activation | tuple[_Activation, ...] = None,
    priority: int | float = 0,
    supports: Callable[[Problem], str | None] = lambda problem: None,
    error: float | Callable[[Problem], float] = 1e-5,
    provided: str = "",
    any_length: bool = False,
    seconds: Callable[[Problem], float] | None = None,
) -> Callable[[Callable], Callable]:
    """Enters a kernel into the dispatch table of quantized products. Decorates a
    function `(x, stored, problem) -> y`, where `stored` holds the arrays that the
    format's `encode` returned, in the layout `problem.layout`: `problem.decode(stored)`
    is the weight.

    Of the kernels that support a problem, the one with the highest priority runs. At
    the same priority, kernels without `seconds` come first, in the order of their
    classes of formats, the most specific first; then the kernel with the shortest
    predicted time. The library's own kernels have the priority zero and predict their
    times. So a kernel with a priority above zero runs before all of them, whatever its
    class, and a kernel with a negative priority runs only where none of them applies.
    The reference product is always last.

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
        `"matmul_transposed"` for `y[m, k] = x[m, n] @ W[n, k]`. This, and each of the
        next three, may be a tuple.
    - `format_type`: the class of formats that the kernel reads.
    - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
    - `activation`: the class of formats in which the kernel quantizes `x`. `None` for a
        weight-only kernel.
    - `priority`: kernels with higher priorities are tried first.
    - `supports`: called with a [`eqquant.Problem`][]. Returns `None` if the kernel can
        compute it, or the reason why it cannot: `"needs a multiple of 8 rows, got 3"`.
    - `error`: a bound on the error of each element of `y` against the product with the
        decoded weight, relative to the product of absolute values `|x| |W|`, for sums
        of up to 128 terms; or a function of a [`eqquant.Problem`][]. (Rounding
        `y` to a narrow dtype comes on top, and subnormal numbers may be flushed to
        zero.) With `precision="highest"`, kernels whose bound is above `1e-5` are
        skipped. Infinities and NaNs should come out as in the product with the decoded
        weight.
    - `provided`: the condition on the operands under which the bound holds:
        `"the weights are on average no smaller where the inputs are larger"`. By
        default it always holds.
    - `any_length`: whether the bound holds for sums of any number of terms. By default,
        each term above 128 adds `2**-24` to it: the most that it may add to the error
        of a sum in float32, in any order.
    - `seconds`: predicts how long the kernel takes for a [`eqquant.Problem`][] that it
        supports, on one core.

    **Returns:**

    A decorator that returns the function unchanged.

    **Raises:**

    A `TypeError` if `format_type` or `activation` is not a class of formats, or
    `priority` is not a number. A `ValueError` for an unknown `product` or `platform`,
    and if another kernel without `seconds` has the same types and the same `priority`,
    since the choice between the two would be ambiguous.
    """
    if isinstance(priority, bool) or not isinstance(priority, int | float):
        raise TypeError(f"`priority` should be a number. Got {priority!r}.")
    products, types = _each(product), _each(format_type)
    where, activations = _each(platform), _each(activation)
    _check_one_of("product", products, get_args(Product))
    _check_one_of("platform", where, platforms)
    for cls in types:
        _check_format_type("format_type", cls)
    for cls in activations:
        if cls is not None:
            _check_format_type("activation", cls)
    activations = tuple(type(None) if cls is None else cls for cls in activations)
    entry = _Entry(products, types, where, activations, priority)

    def register(fn):
        if seconds is None:
            _check_unambiguous(entry, fn.__name__)
        kernel = Kernel(
            fn.__name__,
            fn,
            supports,
            error,
            provided,
            any_length,
            seconds,
            is_for_panels(fn),
        )
        _table.append((entry, kernel))
        if not _chosen.isdisjoint(where):
            # Programs compiled so far may hold a choice that this kernel changes.
            jax.clear_caches()
        return fn

    return register


def choose(problem: Problem, name: str | None = None) -> Choice:
    """Looks up the kernel for a problem.

    **Arguments:**

    - `problem`: the product to compute.
    - `name`: the name of the kernel to use. By default, see `register_kernel`.

    **Raises:**

    A `ValueError` if no kernel has that name, or if it does not support the problem.
    """
    _chosen.add(problem.platform)
    table = id(_table), len(_table)
    if problem.platform == "cpu" and _has_none_from_outside(table):
        # (Layers of a model often have the same products.)
        return _choose_once(problem, name, table, *map(os.environ.get, _environment))
    return _choose(problem, name)


# The library's kernels for CPUs also depend on these variables.
_environment = ("EQQUANT_NATIVE", "EQQUANT_NATIVE_LEVEL")


@ft.lru_cache(maxsize=1)
def _has_none_from_outside(table):
    del table
    return all(kernel.seconds is not None for _, kernel in _table)


@ft.lru_cache(maxsize=1024)
def _choose_once(problem, name, *state):
    del state
    return _choose(problem, name)


def _choose(problem, name):
    groups = _groups(problem)
    if name is not None:
        return _by_name(problem, groups, name)
    refused = []
    for group in groups:
        able = []
        for kernel in group:
            reason = _refusal(kernel, problem)
            if reason is None:
                able.append(kernel)
            else:
                refused.append((kernel, reason))
        if able:
            first, *others = _by_time(able, problem)
            return Choice(first, refused, others)
    raise AssertionError("The reference product supports every problem.")


# Kernels whose times differ by less than this factor count as equally fast: one with
# less than half the error is preferred.
_alike = 1.08


def _by_time(kernels, problem):
    if len(kernels) == 1:
        return kernels
    timed = sorted((kernel.seconds(problem), i) for i, kernel in enumerate(kernels))
    most = _alike * timed[0][0]
    ordered = [kernels[i] for _, i in timed]
    best, *others = [kernels[i] for seconds, i in timed if seconds <= most]
    for kernel in others:
        if kernel.short_bound(problem) < best.short_bound(problem) / 2:
            best = kernel
    ordered.remove(best)
    return [best, *ordered]


def _by_name(problem, groups, name):
    kernels = [kernel for group in groups for kernel in group]
    named = [kernel for kernel in kernels if kernel.name == name]
    if not named:
        names = list(dict.fromkeys(kernel.name for kernel in kernels))
        raise ValueError(
            f"`kernel` should be one of {names}, for the {problem}. Got {name!r}."
        )
    refused = [(kernel, _refusal(kernel, problem)) for kernel in named]
    able = [kernel for kernel, reason in refused if reason is None]
    if not able:
        raise ValueError(
            f"The kernel {name!r} cannot do the {problem}: it {refused[0][1]}."
        )
    return Choice(able[0], [], [])


def supporting(problem: Problem) -> list[Kernel]:
    """Returns all kernels that can compute a problem."""
    every = [kernel for group in _groups(problem) for kernel in group]
    return [kernel for kernel in every if _refusal(kernel, problem) is None]


def _groups(problem: Problem) -> list[list[Kernel]]:
    """Returns the kernels for the types of a problem, in groups that are tried in
    order. Within a group, their predicted times decide."""
    groups: dict[tuple, list[Kernel]] = {}
    for rank, kernel in _of_types(problem):
        groups.setdefault(rank, []).append(kernel)
    ordered = [*(groups[rank] for rank in sorted(groups)), [_reference]]
    if problem.layout.panels:
        return [of_rows_in_panels(group) for group in ordered]
    return ordered


def _of_types(problem):
    found = []
    format, activation = problem.format, problem.activation
    for entry, kernel in _table:
        if (
            problem.platform in entry.platforms
            and problem.product in entry.products
            and isinstance(format, entry.formats)
            and isinstance(activation, entry.activations)
        ):
            measured = kernel.seconds is not None
            distance = () if measured else _distance(entry, problem)
            found.append(((-entry.priority, measured, *distance), kernel))
    if isinstance(format, AbstractComposite):
        for (priority, measured, *distance), kernel in _of_types(of_base(problem)):
            # (Kernels for the composite format itself come first.)
            far = () if measured else (len(type(format).__mro__), *distance)
            found.append(
                ((priority, measured, *far), of_composite_format(kernel, format))
            )
    return found


def _distance(entry, problem):
    # Classes that come earlier in the method resolution order are more specific. The
    # class of the format decides first, then the class of the activation.
    def of(value, classes):
        order = type(value).__mro__
        return min(order.index(cls) for cls in classes if cls in order)

    return of(problem.format, entry.formats), of(problem.activation, entry.activations)


def _refusal(kernel: Kernel, problem: Problem) -> str | None:
    if problem.highest and (error := kernel.short_bound(problem)) > 1e-5:
        return f"has errors up to {error:.0e}, too large for `precision='highest'`"
    return kernel.supports(problem)


def _each(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _check_one_of(name, values, allowed):
    for value in values:
        if value not in allowed:
            raise ValueError(f"`{name}` should be one of {allowed}. Got {value!r}.")


def _check_unambiguous(entry, name):
    for other, kernel in _table:
        both = [set(a) & set(b) for a, b in zip(entry[:-1], other[:-1])]
        if kernel.seconds is None and other.priority == entry.priority and all(both):
            raise ValueError(
                f"The choice between the kernels {name!r} and {kernel.name!r} is "
                f"ambiguous: both are for {min(both[0])!r} of "
                f"{min(cls.__name__ for cls in both[1])} on {min(both[2])!r} with "
                f"`priority={entry.priority}`. Pass another `priority`."
            )


def _check_format_type(name, cls):
    if not (isinstance(cls, type) and issubclass(cls, AbstractFormat)):
        raise TypeError(f"`{name}` should be a class of formats. Got {cls!r}.")
