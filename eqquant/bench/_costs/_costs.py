import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._array import quantize, QuantizedArray, tree_prepack
from ..._ops import qmatmul
from ..._report import explain
from ...formats import (
    AbstractExact,
    Dynamic8,
    Int,
    Int4,
    Int8,
    NF4,
    Ternary,
    Trellis,
)
from ...kernels import Cost, describe_processor, Kind, kind_of, Problem, supporting
from .._entries import Show
from .._error import normal
from .._formats import all_formats, Quantization
from .._machine import describe_machine


# The shapes of a square weight, and of a weight with few results for each row.
_square, _narrow = (2048, 2048), (16384, 128)
_rows = (1, 2, 4, 8, 64)
_rounds = 4
_turn = 0.01


def kinds_to_measure() -> list[Quantization]:
    """Returns a quantization for each kind of weight to measure."""
    short = [Int8(32), Int4(32), NF4(32), Ternary(32), Ternary(64, radix=4)]
    others = [Int(bits, 64) for bits in (2, 3, 5, 6, 7)]
    minima = [Int(bits, 64, offset="minimum") for bits in (2, 3, 5, 6)]
    rounded = [Int8(64), Int4(), Ternary()]
    # (The number of states does not matter, except for the time to quantize.)
    trellises = [Trellis(bits, states=8) for bits in (2, 3, 4)]
    return [
        *all_formats(),
        *map(Quantization, [*short, *others, *minima, Dynamic8(), *trellises]),
        *(Quantization(format, Int8()) for format in rounded),
    ]


class Product(NamedTuple):
    """A product to time: `x @ q`, or `x @ q.T` if `across` the blocks of the weight."""

    x: Any
    q: QuantizedArray
    across: bool
    problem: Problem

    @property
    def kind(self) -> Kind:
        problem = self.problem
        panels = problem.layout.panels is not None
        return kind_of(problem.product, problem.format, problem.activation, panels)

    @property
    def kernels(self) -> list[str]:
        """The measured kernels that can compute it from the stored arrays as they
        are."""
        kernels = [k for k in supporting(self.problem) if k.seconds is not None]
        if self.problem.layout.panels is not None:
            kernels = [k for k in kernels if k.reads_panels]
        return list(dict.fromkeys(kernel.name for kernel in kernels))

    def by(self, kernel: str) -> Callable[[], Any]:
        """Returns a function that computes it by a kernel."""
        fn = jax.jit(lambda x, q: qmatmul(x, q.T if self.across else q, kernel=kernel))
        compiled = fn.lower(self.x, self.q).compile()
        return lambda: jax.block_until_ready(compiled(self.x, self.q))


def product(
    quantization: Quantization,
    shape: tuple[int, int],
    rows: int,
    *,
    across: bool = False,
    panels: bool = False,
) -> Product | None:
    """Returns the product `x @ q` for a weight of a shape, or `x @ q.T` if `across` its
    blocks. Returns `None` if the weight cannot be prepacked in `panels`."""
    q = _weight(quantization, shape, panels)
    if q is None:
        return None
    x = jnp.asarray(normal((rows, shape[1 if across else 0]), 1))
    problem = explain(x, q.T if across else q).problem
    assert problem is not None
    return Product(x, q, across, problem)


_weights: dict[Any, QuantizedArray | None] = {}


def _weight(quantization, shape, panels):
    key = quantization, shape, panels
    if key not in _weights:
        _weights.clear()
        w = normal(shape, 0)
        if isinstance(quantization.format, AbstractExact):
            lowest, *_, highest = quantization.format.domain
            w = np.clip(np.round(w), lowest, highest)
        format, activation = quantization
        q = quantize(jnp.asarray(w), format, activation=activation)
        if panels:
            q = tree_prepack(q)
            q = q if q.layout.panels is not None else None
        _weights[key] = q
    return _weights[key]


def on_one_core() -> None:
    """Keeps this process on one core, so that its processor time is the time of the
    work alone. Must be called before JAX starts."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def times(calls: Sequence[Callable[[], Any]], rounds: int = _rounds) -> list[float]:
    """Returns the minimum processor time of each function, in seconds. The functions
    are called in turn."""
    found = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(rounds):
        for i, call in enumerate(calls):
            number, start = 0, time.process_time()
            while number == 0 or time.process_time() - start < _turn:
                call()
                number += 1
            found[i] = min(found[i], (time.process_time() - start) / number)
    return found


def measure_costs(show: Show | None = None) -> dict[str, Any]:
    """Measures the times of all CPU kernels on this machine, and returns the content of
    a file in `eqquant/kernels/cpu/costs`."""
    ways = [(False, False), (True, False), (False, True)]
    every = [(q, *way) for q in kinds_to_measure() for way in ways]
    costs: dict[Kind, dict[str, Cost]] = {}
    for i, (quantization, across, panels) in enumerate(every):
        if show is not None:
            show(i / len(every), str(quantization))
        if across and quantization.activation is not None:
            continue
        for kind, of_kernels in _costs(quantization, across, panels):
            costs.setdefault(kind, of_kernels)
    processor = describe_processor()
    return {
        "name": describe_machine(),
        "vendor": processor.vendor,
        "family": processor.family,
        "features": sorted(processor.features),
        "fuses": jax.__version_info__ >= (0, 11),
        "costs": [[kind, of_kernels] for kind, of_kernels in costs.items()],
    }


def _costs(quantization, across, panels):
    way = dict(across=across, panels=panels)
    seconds: dict[str, dict[int, float]] = {}
    kind = None
    for rows in _rows:
        found = product(quantization, _square, rows, **way)
        if found is None:
            return
        kind = found.kind
        names = found.kernels
        for name, its in zip(names, times([found.by(name) for name in names])):
            seconds.setdefault(name, {})[rows] = its
    # A product across the blocks has as many results as a row has numbers, so the
    # narrow shape is transposed.
    shape = (_narrow[1], _narrow[0]) if across else _narrow
    narrow = {}
    for rows in {max(its) for its in seconds.values()} - {1, 2}:
        found = product(quantization, shape, rows, **way)
        names = [name for name in seconds if max(seconds[name]) == rows]
        if found is not None:
            narrow |= zip(names, times([found.by(name) for name in names]))
    assert kind is not None
    yield kind, {name: _cost(its, narrow.get(name)) for name, its in seconds.items()}


def _cost(seconds: dict[int, float], narrow: float | None) -> Cost:
    """Returns the cost of a kernel with these times for some numbers of rows and a
    square weight, and this one for the most rows and a narrow weight."""
    rows, square = np.array([*seconds]), _square[0]
    # The times for each number of the weight, in picoseconds.
    each = np.array([*seconds.values()]) * 1e12 / np.prod(_square)
    inputs = 0.0
    if narrow is not None:
        first, last = rows[0], rows[-1]
        more = narrow * 1e12 / np.prod(_narrow) - each[-1]
        inputs = more / (last / min(_narrow) - last / square)
        # The time for a number of the weight never decreases with more rows.
        most = (each[-1] - each[0]) / max(last - first, 1) * square
        inputs = float(np.clip(inputs, 0, max(most, 0)))
    each = each - rows * inputs / square
    return Cost(rows.tolist(), each.round(2).tolist(), round(inputs, 2))


def write_costs(path: str | os.PathLike[str], show: Show | None = None) -> None:
    """Measures the costs of this machine, and writes a file for
    `eqquant/kernels/cpu/costs`."""
    found = measure_costs(show)
    costs = ",\n".join(f"    {json.dumps(one)}" for one in found.pop("costs"))
    head = json.dumps(found, indent=2).removesuffix("\n}")
    text = f'{head},\n  "costs": [\n{costs}\n  ]\n}}\n'
    pathlib.Path(path).write_text(text, encoding="utf-8")
