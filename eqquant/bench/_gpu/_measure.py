import dataclasses
import functools as ft
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..._array import quantize, QuantizedArray, tree_prepack
from ..._report import explain
from ...formats import round_trip
from .._entries import Meter, Show
from .._formats import Quantization


@dataclasses.dataclass(frozen=True)
class GPUMeasurement:
    """The speed and the error of a product on a GPU.

    - `name`: the name of the format, or `"bfloat16"` for JAX's own product.
    - `shape`: the shape of the weight, contracted axis first.
    - `rows`: the number of rows of `x`.
    - `kernel`: the kernel that [`eqquant.explain`][] names. `None` for bfloat16.
    - `seconds`: the time of one product, the median of several rounds.
    - `baseline`: the time of the product in bfloat16.
    - `nbytes`: the size of the stored weight in bytes.
    - `copy`: the bytes per second that a copy within GPU memory reads and writes.
    - `error`: the largest error, relative to `|x| @ |w|`.
    - `bound`: the bound on that error.
    """

    name: str
    shape: tuple[int, int]
    rows: int
    kernel: str | None
    seconds: float
    baseline: float
    nbytes: int
    copy: float
    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """The speed relative to bfloat16."""
        return self.baseline / self.seconds

    @property
    def bandwidth(self) -> float:
        """The rate at which the weight is read, as a share of the rate of a copy."""
        return self.nbytes / self.seconds / self.copy

    @property
    def is_right(self) -> bool:
        return self.error <= self.bound


# The number of products in a program: enough to take longer than its launch.
_together = 16


def measure_gpu(
    cases: Sequence[tuple[tuple[int, int], int]],
    formats: Sequence[Quantization],
    *,
    cycle: int = 2**29,
    copied: int = 2**30,
    turn: float | int = 0.02,
    rounds: int = 5,
    show: Show | None = None,
) -> list[GPUMeasurement]:
    """Measures products on the default device, which should be a GPU, next to products
    in bfloat16. `x` is in bfloat16, too.

    **Arguments:**

    - `cases`: shapes of weights, contracted axis first, and numbers of rows.
    - `formats`: the formats of the weights.
    - `cycle`: the bytes of weights to use in turn, so that none comes from a cache.
    - `copied`: the bytes to copy when measuring the rate of memory.
    - `turn`, `rounds`: the seconds for which to time each product, and how many times.
    - `show`: as in [`eqquant.bench.measure`][].

    **Returns:**

    A list of `GPUMeasurement`s: for each case, bfloat16, then `formats`.
    """
    timed = ft.partial(_seconds, turn=turn, rounds=rounds)
    meter = Meter(len(cases) * (len(formats) + 1), show)
    copy = _copy_rate(copied, timed)
    found = []
    for (k, n), m in cases:
        w = jax.random.normal(jax.random.key(0), (k, n), jnp.bfloat16)
        x = jax.random.normal(jax.random.key(1), (m, k), jnp.bfloat16)
        # Measure the baseline anew for each case, close in time to the other products.
        meter.add(1, f"{k}x{n}, {m} rows, bfloat16")
        baseline = _time_product(x, w, cycle, timed)
        measured = ft.partial(
            GPUMeasurement, shape=(k, n), rows=m, baseline=baseline, copy=copy
        )
        found.append(
            measured(
                name="bfloat16",
                kernel=None,
                seconds=baseline,
                nbytes=w.nbytes,
                error=float(_error(x @ w, x, w)),
                bound=_rounding,
            )
        )
        for format, activation in formats:
            quantization = Quantization(format, activation)
            meter.add(1, f"{k}x{n}, {m} rows, {quantization}")
            # Store the weight as in a layer, whose product is `weight @ x`.
            q = quantize(w.T, format, axis=-1, activation=activation)
            q = tree_prepack(q, platform="gpu").mT
            explained = explain(x, q)
            assert explained.error is not None
            rounded = x if activation is None else round_trip(x, activation)
            found.append(
                measured(
                    name=str(quantization),
                    kernel=explained.kernel,
                    seconds=_time_product(x, q, cycle, timed),
                    nbytes=q.nbytes,
                    error=float(_error(x @ q, rounded, q.dequantize())),
                    bound=explained.error + _rounding,
                )
            )
    return found


# The error of rounding the product to bfloat16.
_rounding = float(jnp.finfo(jnp.bfloat16).eps)


@jax.jit
def _error(
    y: Float[Array, "m n"], x: Float[Array, "m k"], w: Float[Array, "k n"]
) -> Float[Array, ""]:
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    dot = ft.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    difference = jnp.abs(y.astype(jnp.float32) - dot(x, w))
    return jnp.max(difference / dot(jnp.abs(x), jnp.abs(w)))


def _time_product(
    x: Float[Array, "m k"],
    w: Float[Array, "k n"] | QuantizedArray,
    cycle: int,
    timed: Callable[[Sequence[Callable[[], Any]]], float],
) -> float:
    number = _together * max(1, math.ceil(cycle / w.nbytes / _together))
    copies = [jtu.tree_map(lambda a: a.copy(), w) for _ in range(number)]
    calls = [
        ft.partial(_products, x, copies[i : i + _together])
        for i in range(0, number, _together)
    ]
    return timed(calls) / _together


@jax.jit
def _products(x, weights):
    # The barrier makes each product wait for the one before, so that they run one after
    # another. All are returned, because XLA removes unused products.
    product = jax.jit(lambda x, w: x @ w)
    products = []
    for w in weights:
        x, y = lax.optimization_barrier((x, product(x, w)))
        products.append(y)
    return products


def _copy_rate(nbytes, timed):
    a = jnp.zeros((nbytes // 4,), jnp.uint32)
    copied = jax.jit(lambda a: a ^ np.uint32(1))
    return 2 * nbytes / timed([lambda: copied(a)])


def _seconds(
    calls: Sequence[Callable[[], Any]], turn: float | int, rounds: int
) -> float:
    """Returns the median time of a call, for several functions that are called in
    turn."""

    def run(number):
        start = time.perf_counter()
        for i in range(number - 1):
            calls[i % len(calls)]()
        # (A GPU runs programs in order: waiting for the last one is enough.)
        jax.block_until_ready(calls[-1]())
        return time.perf_counter() - start

    run(len(calls))
    number = max(len(calls), math.ceil(turn / (run(len(calls)) / len(calls))))
    return float(np.median([run(number) / number for _ in range(rounds)]))
