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

from .._array import is_quantized, quantize, tree_prepack
from .._report import explain
from ..formats import AbstractExact
from ._formats import Quantization
from ._memory_rate import number_of_copies


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A product that is ready to be timed.

    - `fn`: computes the product of rows and a weight, and blocks until it is done.
    - `seconds`: the time to compile it; `None` if nothing was compiled.
    - `temporary_bytes`: the memory that it allocates while it runs; `None` if unknown.
    """

    fn: Callable[[Any, Any], Any]
    seconds: float | None
    temporary_bytes: int | None


def compile(fn: Callable[[Any, Any], Any], x: Any, weight: Any) -> Compiled:
    """Compiles a product by XLA."""
    start = time.perf_counter()
    # A new function, so that JAX does not reuse an earlier compilation.
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

    - `weight`: the stored weight.
    - `nbytes`: the number of bytes of `weight`.
    - `decoded`: returns the weight as a dense array.
    - `fn`: computes the product of rows and `weight`.
    - `operand`: converts rows to an argument of `fn`.
    - `result`: converts a result of `fn` to a NumPy array.
    - `kernel`: returns the name of the kernel for some rows, or `None`.
    - `compile`: compiles `fn` for some rows and `weight`.
    - `copy`: copies `weight`.
    - `suffix`: the suffix of its name, which distinguishes it from other ways with the
      same weight.
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
    suffix: str = ""

    def rotation(self, cycle: int) -> list[Any]:
        """Returns the weight and as many copies of it as take `cycle` bytes in all."""
        copies = range(number_of_copies(self.nbytes, cycle) - 1)
        weights = [self.weight, *[self.copy(self.weight) for _ in copies]]
        return jax.block_until_ready(weights)


def rotating(fn: Callable, x: Any, weights: list[Any]) -> Callable[[], Any]:
    """Returns a function without arguments, each call of which multiplies by the next
    weight."""
    turn = itertools.cycle(weights)
    return lambda: fn(x, next(turn))


def dense(dtype: Any, w: Float[np.ndarray, "k n"]) -> Candidate:
    """Returns JAX's own product."""
    weight = jnp.asarray(w, dtype)
    return Candidate(
        weight=weight,
        nbytes=weight.nbytes,
        decoded=lambda: as_float32(weight),
        operand=lambda x: jnp.asarray(x, dtype),
    )


def quantized(quantization: Quantization, w: Float[np.ndarray, "k n"]) -> Candidate:
    """Returns the product of this library. For formats that store integers only, the
    weight is rounded first."""
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


# The suffixes of the names of measurements: without the native library, and with
# weights in the order of `tree_prepack` for this machine.
xla = ", XLA"
prepacked = ", prepacked"


@contextlib.contextmanager
def without_native() -> Iterator[None]:
    """A context in which kernels are chosen as if there were no native library."""
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
    """Returns the same product of the same weight, without the native library."""
    return dataclasses.replace(
        candidate,
        kernel=without_native()(candidate.kernel),
        compile=without_native()(candidate.compile),
        suffix=xla,
    )


def by_prepacking(candidate: Candidate) -> Candidate | None:
    """Returns the same product of a prepacked weight, or `None` if prepacking does not
    change the weight on this machine."""
    if not is_quantized(candidate.weight):
        return None
    weight = tree_prepack(candidate.weight)
    if weight is candidate.weight:
        return None
    return dataclasses.replace(
        candidate,
        weight=weight,
        kernel=lambda x: explain(x, weight).kernel,
        suffix=prepacked,
    )
