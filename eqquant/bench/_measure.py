import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..formats import AbstractFormat
from ._candidate import by_prepacking, by_xla, Candidate, rotating, xla
from ._clock import Clock
from ._entries import entries, Entry, Failure, Meter, Show
from ._error import normal, product_error, with_outliers
from ._formats import as_quantization, default_formats, Quantization
from ._measurement import Measurement
from ._memory_rate import default_cycle, default_reading, physical_memory, Reading


def measure(
    shapes: Sequence[tuple[int, int]] = ((4096, 11008),),
    rows: Sequence[int] = (1, 128),
    formats: Sequence[Quantization | AbstractFormat | str] | None = None,
    *,
    peers: bool = False,
    budget: float | int = 6,
    min_rounds: int = 9,
    cycle: int | None = None,
    seed: int = 0,
    show: Show | None = None,
) -> list[Measurement]:
    """Measures products with quantized weights on this machine, next to products in
    float32 and bfloat16.

    All products of the same shape are timed in turn, in one process. Each cycles
    through copies of its weight, so that the weight is read from memory, as in a model,
    and not from a cache. In turn with products of one row, a float32 matrix of at least
    1 GB is multiplied by a vector, to measure the memory bandwidth. If these copies
    would take more than half of the machine's memory, the products are timed in groups,
    each next to float32.

    Where a kernel of the native library is chosen, the product is also measured with
    the kernel that would be chosen without it. Where [`eqquant.tree_prepack`][]
    reorders the weight for this machine, the prepacked weight is also measured.

    !!! Example

        ```python
        for row in eqquant.bench.measure([(1024, 4096)], [1], ["int8", "nf4"]):
            print(row.name, row.kernel, row.times.ratio, row.error)
        ```

    **Arguments:**

    - `shapes`: the shapes of the weights, contracted axis first.
    - `rows`: the numbers of rows by which to multiply each.
    - `formats`: formats, names of formats, or `Quantization`s. A name such as
        `"int8:int8"` gives the formats of the weight and of the rows.
    - `peers`: whether to measure the other libraries that are installed, too.
    - `budget`: the seconds for each shape and number of rows, once all products are
        compiled.
    - `min_rounds`: the minimum number of times to time each product.
    - `cycle`: the bytes of weights to use in turn. By default, four times the size of
        the largest cache, and at least 256 MB.
    - `seed`: the random seed of the weights and of the rows.
    - `show`: called from time to time with the fraction of the work that is done, and a
        description of the current step.

    **Returns:**

    A list of `Measurement`s: for each shape and number of rows, float32, bfloat16,
    `formats`, and other libraries.
    """
    _check(shapes, rows)
    read = default_reading() if cycle is None else cycle
    cycle = default_cycle() if cycle is None else cycle
    formats = default_formats() if formats is None else formats
    baseline, *wanted = entries([as_quantization(format) for format in formats], peers)
    # The threads of other libraries spin for a while after their work: let them stop.
    clock = Clock(budget, min_rounds, rest=0.005 if peers else 0)
    groups = {shape: _groups(wanted, shape, cycle, read) for shape in shapes}
    # Each step takes about a second.
    steps = sum(
        (1 + len(group)) * (1 + len(rows)) + budget * len(rows)
        for its in groups.values()
        for group in its
    )
    meter = Meter(steps, show)
    found = []
    for shape in shapes:
        for i, group in enumerate(groups[shape]):
            its = _products(
                shape, rows, [baseline, *group], cycle, read, seed, clock, meter
            )
            found += [row for row in its if i == 0 or row.name != baseline.name]
    place = {shape: i for i, shape in enumerate(shapes)}
    order = {m: i for i, m in enumerate(rows)}
    return sorted(found, key=lambda row: (place[row.shape], order[row.rows]))


def _groups(
    wanted: Sequence[Entry], shape: tuple[int, int], cycle: int, read: int
) -> list[Sequence[Entry]]:
    """Divides products into groups whose weights fit into half of the memory, next to
    the matrix that is read and two dense copies of a weight. (Each product may have
    prepacked weights, too.)"""
    dense, memory = 4 * math.prod(shape), physical_memory()
    if memory is None:
        return [wanted]
    free = memory // 2 - read - 2 * dense
    # The baseline's weights are in every group.
    size = max(1, free // (2 * cycle + dense) - 1)
    return [wanted[i : i + size] for i in range(0, len(wanted), size)]


def _check(shapes, rows):
    for shape in shapes:
        if min(shape) < 1:
            raise ValueError(
                "`shapes` should be pairs of positive numbers, such as (4096, 11008). "
                f"Got {shape}."
            )
    if min(rows, default=1) < 1:
        raise ValueError(f"`rows` should be positive numbers. Got {rows}.")


def _products(
    shape: tuple[int, int],
    rows: Sequence[int],
    wanted: Sequence[Entry],
    cycle: int,
    read: int,
    seed: int,
    clock: Clock,
    meter: Meter,
) -> Iterator[Measurement]:
    size = "x".join(map(str, shape))
    w = normal(shape, seed)
    stored = []
    for entry in wanted:
        meter.add(1, f"{size}, storing {entry.name}")
        stored.append(entry.attempt(ft.partial(_store, entry, w, cycle)))
    for m in rows:
        problem = f"{size}, {m} {'row' if m == 1 else 'rows'}"
        x = normal((m, shape[0]), seed + 1)
        results = []
        for entry, its in zip(wanted, stored):
            meter.add(1, f"{problem}, compiling {entry.name}")
            row = Measurement(entry.name, m, shape)
            if not isinstance(its, Failure):
                its = entry.attempt(ft.partial(_prepare, row, its, x))
            if isinstance(its, Failure):
                its = [(dataclasses.replace(row, failure=its.message), None)]
            results.extend(its)
        calls = [call for _, call in results if call is not None]
        readings = [Reading(read)] if m == 1 else []
        timed = clock([*calls, *readings], lambda s: meter.add(s, f"{problem}, timing"))
        memory = max((r.rate(timed.pop()) for r in readings), default=math.nan)
        times = iter(timed)
        for row, call in results:
            known = row.times if call is None else next(times)
            yield dataclasses.replace(row, times=known, memory=memory)


def _store(
    entry: Entry, w: Float[np.ndarray, "k n"], cycle: int
) -> list[tuple[Candidate, list[Any]]]:
    """Returns the ways to compute a product, each with the weights that it cycles
    through."""
    candidate = entry.make(w)
    weights = candidate.rotation(cycle)
    ways = [(candidate, weights), (by_xla(candidate), weights)]
    other = by_prepacking(candidate)
    return ways if other is None else [*ways, (other, other.rotation(cycle))]


def _prepare(
    row: Measurement,
    ways: list[tuple[Candidate, list[Any]]],
    x: Float[np.ndarray, "m k"],
) -> list[tuple[Measurement, Callable[[], Any]]]:
    """Prepares a product in all ways. The way without the native library is left out if
    its kernel is the same."""
    kernels = [candidate.kernel(candidate.operand(x)) for candidate, _ in ways]
    return [
        _prepare_one(row, candidate, weights, x)
        for (candidate, weights), kernel in zip(ways, kernels)
        if candidate.suffix != xla or kernel != kernels[0]
    ]


def _prepare_one(
    row: Measurement,
    candidate: Candidate,
    weights: list[Any],
    x: Float[np.ndarray, "m k"],
) -> tuple[Measurement, Callable[[], Any]]:
    """Returns the measurement of a product without its times, and the function to
    time."""
    operand = candidate.operand(x)
    compiled = candidate.compile(candidate.fn, operand, candidate.weight)
    decoded = candidate.decoded()
    errors = []
    for rows in (x, with_outliers(x)):
        y = compiled.fn(candidate.operand(rows), candidate.weight)
        errors.append(product_error(candidate.result(y), rows, decoded))
    row = dataclasses.replace(
        row,
        name=row.name + candidate.suffix,
        kernel=candidate.kernel(operand),
        bits_per_weight=8 * candidate.nbytes / decoded.size,
        temporary_bytes=compiled.temporary_bytes,
        error=errors[0],
        outlier_error=errors[1],
        compile_seconds=compiled.seconds,
    )
    return row, rotating(compiled.fn, operand, weights)
