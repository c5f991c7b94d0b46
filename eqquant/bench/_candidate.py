import contextlib
import dataclasses
import itertools
import operator
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from .._array import quantize
from .._report import explain
from ..formats import AbstractExact
from ._formats import Quantization
from ._memory_rate import number_of_copies


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A product that is ready to be timed.

    - `fn`: from rows and a weight to the product, once that is done.
    - `seconds`: how long it took to compile, `None` if nothing was compiled.
    - `temporary_bytes`: what it allocates while it runs, `None` if that is not known.
    """

    fn: Callable[[Any, Any], Any]
    seconds: float | None
    temporary_bytes: int | None


def compile(fn: Callable[[Any, Any], Any], x: Any, weight: Any) -> Compiled:
    start = time.perf_counter()
    # A new function each time, or else this might have been compiled before.
    compiled = jax.jit(lambda x, weight: fn(x, weight)).lower(x, weight).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Compiled(
        lambda x, weight: jax.block_until_ready(compiled(x, weight)),
        seconds,
        None if memory is None else int(memory.temp_size_in_bytes),
    )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to compute `x @ w`.

    - `weight`: `w`, as this stores it.
    - `nbytes`: how many bytes that takes.
    - `decoded`: gives the ordinary array that it stands for.
    - `fn`: from rows and `weight` to the product.
    - `operand`: makes the rows what `fn` takes.
    - `result`: makes an array of NumPy of what `fn` returns.
    - `kernel`: gives the name of the one that is used, for such rows.
    - `compile`: of `fn`, for some rows and `weight`.
    - `copy`: of `weight`.
    """

    weight: Any
    nbytes: int
    decoded: Callable[[], Float[np.ndarray, "k n"]]
    fn: Callable[[Any, Any], Any] = operator.matmul
    operand: Callable[[Float[np.ndarray, "m k"]], Any] = jnp.asarray
    result: Callable[[Any], Float[np.ndarray, "m n"]] = np.asarray
    kernel: Callable[[Any], str | None] = lambda x: None
    compile: Callable[[Callable, Any, Any], Compiled] = compile
    copy: Callable[[Any], Any] = lambda w: jtu.tree_map(lambda a: a.copy(), w)

    def rotation(self, cycle: int) -> list[Any]:
        """The weight and copies of it, `cycle` bytes in all."""
        copies = range(number_of_copies(self.nbytes, cycle) - 1)
        weights = [self.weight, *[self.copy(self.weight) for _ in copies]]
        return jax.block_until_ready(weights)


def rotating(fn: Callable, x: Any, weights: list[Any]) -> Callable[[], Any]:
    """A function without arguments, that multiplies with the next weight each time."""
    turn = itertools.cycle(weights)
    return lambda: fn(x, next(turn))


def dense(dtype: Any, w: Float[np.ndarray, "k n"]) -> Candidate:
    """The product that JAX itself has."""
    weight = jnp.asarray(w, dtype)
    return Candidate(
        weight=weight,
        nbytes=weight.nbytes,
        decoded=lambda: as_float32(weight),
        operand=lambda x: jnp.asarray(x, dtype),
    )


def quantized(quantization: Quantization, w: Float[np.ndarray, "k n"]) -> Candidate:
    """The product of this library. A format that stores integers only stores those that
    are nearest."""
    if isinstance(quantization.format, AbstractExact):
        lowest, *_, highest = quantization.format.domain
        w = np.clip(np.round(w), lowest, highest)
    weight = quantize(w, quantization.format, activation=quantization.activation)
    return Candidate(
        weight=weight,
        nbytes=weight.nbytes,
        decoded=lambda: as_float32(weight.dequantize()),
        kernel=lambda x: explain(x, weight).kernel,
    )


def as_float32(a: Array) -> Float[np.ndarray, "..."]:
    return np.asarray(a.astype(jnp.float32))


# Ends the names of what is measured without the native library, next to the same with
# it.
xla = ", XLA"


@contextlib.contextmanager
def without_native() -> Iterator[None]:
    """While this lasts, kernels are chosen as where there is no native library."""
    before = os.environ.get("EQQUANT_NATIVE")
    os.environ["EQQUANT_NATIVE"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["EQQUANT_NATIVE"]
        else:
            os.environ["EQQUANT_NATIVE"] = before


def by_xla(candidate: Candidate) -> Candidate:
    """The same product of the same weight, without the native library."""
    return dataclasses.replace(
        candidate,
        kernel=without_native()(candidate.kernel),
        compile=without_native()(candidate.compile),
    )
