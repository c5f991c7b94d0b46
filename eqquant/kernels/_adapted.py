import dataclasses
import functools as ft
import inspect
from collections.abc import Callable, Sequence

import jax.tree_util as jtu
from jaxtyping import Array, Float

from ..formats import AbstractComposite, AbstractGGUFBytes, Stored
from ._kernel import Kernel
from ._problem import Problem


# Runs kernels for weights that are stored otherwise than the kernel reads them.


# A composite format has the codes of its base, and so it has the kernels of its base.
# Most of these get scales that `flat` computes. The following read scales of one byte
# directly.
_of_bytes: set[Callable] = set()


def reads_byte_scales(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Declares that a kernel for grids reads scales as `problem.byte_scales`
    describes."""
    _of_bytes.add(fn)
    return fn


# These kernels read rows in panels. All others get rows side by side.
_of_panels: set[Callable] = set()


def reads_panels(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Declares that a kernel reads rows in panels, too (see `Layout`). It gets each
    stored array as `_ n`, like an array of rows side by side, but the elements are in
    the order of `n/64 _ 64`."""
    _of_panels.add(inspect.unwrap(fn))
    return fn


def is_for_panels(fn: Callable[..., Array]) -> bool:
    """Whether a kernel is declared to read rows in panels."""
    return inspect.unwrap(fn) in _of_panels


def of_base(problem: Problem) -> Problem:
    """Returns the problem of a product with a composite format as a problem of its
    base."""
    assert isinstance(problem.format, AbstractComposite)
    layout = dataclasses.replace(problem.layout, format=problem.format.base)
    return dataclasses.replace(problem, layout=layout, composite=True)


def on_base(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Makes a kernel for a composite format from a kernel for its base."""

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


# The time to unpack a block of a file to codes and scales, in seconds for each number
# of a weight, on one core: about the time to decode it, for which Zen 5 takes 2.6e-9
# with 4 bits and scales of 6. (Other composite formats compute scales only.)
_seconds_to_unpack = 2000e-12


def of_composite_format(kernel: Kernel, format: AbstractComposite) -> Kernel:
    """Returns the kernel for a composite format, from a kernel for its base."""
    found = _on(of_base, kernel, on_base(kernel.fn))
    found = found._replace(reads_panels=kernel.reads_panels and format.by_element)
    if isinstance(format, AbstractGGUFBytes):
        return _later(found, _seconds_to_unpack)
    return found


def _later(kernel: Kernel, each: float) -> Kernel:
    """Returns a kernel that takes `each` seconds longer for each number of the
    weight."""
    if (seconds := kernel.seconds) is None:
        return kernel
    return kernel._replace(seconds=lambda p: seconds(p) + p.numbers * each)


def _on(
    other: Callable[[Problem], Problem], kernel: Kernel, fn: Callable[..., Array]
) -> Kernel:
    """Returns `fn`, which runs a kernel for another problem, as a kernel."""
    seconds, error = kernel.seconds, kernel.error
    return kernel._replace(
        fn=fn,
        supports=lambda problem: kernel.supports(other(problem)),
        error=(lambda problem: error(other(problem))) if callable(error) else error,
        seconds=None if seconds is None else lambda problem: seconds(other(problem)),
    )


def of_rows_in_panels(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Returns the kernels for rows in panels, from the kernels for the same weight."""
    # Kernels that read panels come first.
    reads = [_of_matrices(kernel) for kernel in kernels if kernel.reads_panels]
    return [*reads, *map(_of_rows_side_by_side, kernels)]


def _of_matrices(kernel):
    @ft.wraps(kernel.fn)
    def fn(x, stored, problem):
        shape = lambda a: problem.layout.shape_by_row(a)[::-1]
        stored = jtu.tree_map(lambda a: a.reshape(shape(a)), stored)
        return kernel.fn(x, stored, problem)

    return kernel._replace(fn=fn)


# The time to lay rows side by side, in seconds for each number of a weight, on one
# core. (On Zen 5, products of one row take 20e-12 longer with codes of 4 bits, and
# 40e-12 to 50e-12 with codes of 8.)
_seconds_to_lay = 40e-12


def _of_rows_side_by_side(kernel):
    @ft.wraps(kernel.fn)
    def fn(x, stored, problem):
        stored = problem.layout.without_panels(stored)
        return kernel.fn(x, stored, _side_by_side(problem))

    about = inspect.getdoc(kernel.fn) or ""
    fn.__doc__ = f"Lays the rows of the weight side by side first. {about}".strip()
    plain = _on(_side_by_side, kernel, fn)._replace(reads_panels=False)
    return _later(plain, _seconds_to_lay)


def _side_by_side(problem):
    return dataclasses.replace(problem, layout=problem.layout.side_by_side)


def _flat(stored, problem):
    layout, format = problem.layout, problem.format
    if format.by_element:
        # (Swapping axes back and forth would make XLA write transposed copies.)
        return format.flat(stored, layout.tail)
    return layout.from_rows(format.flat(layout.to_rows(stored), layout.tail))
