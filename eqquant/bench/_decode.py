import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._array import is_quantized, QuantizedArray, tree_prepack
from .._report import explain
from .._tree import tree_dequantize, tree_quantize
from ..formats import AbstractFormat, as_format, Int4, Int8, NF4, Ternary
from ._candidate import prepacked, without_native, xla
from ._clock import Clock, Times
from ._decoder import Decoder, empty_past, random_decoder, Size
from ._entries import Meter, Show
from ._formats import Quantization


# (Under a trace, `tree_quantize` shows no progress bar.)
_quantize = eqx.filter_jit(tree_quantize)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """The speed at which a model generates text, one token at a time.

    - `name`: the format of its weights. It ends in `", XLA"` if kernels were chosen
      without the native library, and in `", prepacked"` if the weights were prepacked
      by [`eqquant.tree_prepack`][].
    - `parameters`: the number of parameters of the model.
    - `bits_per_weight`: the bits of each quantized weight, scales included.
    - `nbytes`: the size of the whole model in bytes.
    - `times`: the times of one step, next to the times of the model in float32.
    - `temporary_bytes`: the memory that the compiled step allocates while it runs.
      `None` if unknown.
    - `error`: the largest error of the logits, relative to the largest logit, against
      the same model with its weights decoded.
    - `compile_seconds`: the time to compile the step.
    """

    name: str
    parameters: int
    bits_per_weight: float
    nbytes: int
    times: Times
    temporary_bytes: int | None
    error: float
    compile_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.times.median


def measure_decoding(
    formats: Sequence[AbstractFormat | str] = (Int8(), Ternary(), NF4(), Int4()),
    *,
    size: Size = Size(),
    budget: float | int = 12,
    min_rounds: int = 9,
    seed: int = 0,
    show: Show | None = None,
) -> list[Decoding]:
    """Measures a decoding step of a transformer with random weights on this machine, in
    float32 and with all weights but the embedding quantized. The models are called in
    turn, in one process. Models that use kernels of the native library are also
    measured without it. Models that [`eqquant.tree_prepack`][] reorders for this
    machine are also measured prepacked.

    **Arguments:**

    - `formats`: formats, or names of formats.
    - `size`: the size of the transformer. By default it has 134 million parameters.
    - `budget`: the seconds for which to call the models, once all are compiled.
    - `min_rounds`: the minimum number of calls of each.
    - `seed`: the random seed of the weights.
    - `show`: called from time to time with the fraction of the work that is done, and a
      description of the current step.

    **Returns:**

    A list of `Decoding`s. The first is for the model in float32.
    """
    wanted = [as_format(format) for format in formats]
    # Quantizing, compiling and checking a model takes about eight seconds.
    meter = Meter(8 * (1 + len(wanted)) + budget, show)
    dense = random_decoder(size, seed)
    steps = []
    for format in (None, *wanted):
        name = "float32" if format is None else str(Quantization(format))
        meter.add(8, f"decoding, compiling {name}")
        model = dense if format is None else _quantize(dense, format)
        steps.append(_Step(name, model, size))
        with without_native():
            if _kernels(model) != steps[-1].kernels:
                meter.add(0, f"decoding, compiling {name}{xla}")
                steps.append(_Step(name + xla, model, size))
        laid = tree_prepack(model)
        if _layouts(laid) != _layouts(model):
            meter.add(0, f"decoding, compiling {name}{prepacked}")
            steps.append(_Step(name + prepacked, laid, size))
    clock = Clock(budget, min_rounds)
    times = clock(steps, lambda seconds: meter.add(seconds, "decoding, timing"))
    return [step.row(its) for step, its in zip(steps, times)]


class _Step:
    """A compiled decoding step, with the keys and values of one text."""

    def __init__(self, name: str, model: Decoder, size: Size):
        self.name = name
        self.model = model
        self.kernels = _kernels(model)
        self.token = jnp.asarray(0), jnp.asarray(size.positions - 1)
        start = time.perf_counter()
        # The keys and values are updated in place.
        self.step = jax.jit(lambda model, *args: model(*args), donate_argnums=3)
        args = model, *self.token, empty_past(size)
        self.compiled = self.step.lower(*args).compile()
        self.compile_seconds = time.perf_counter() - start
        dense = tree_dequantize(model)
        expected, _ = jax.jit(lambda model, *args: model(*args))(dense, *args[1:])
        logits, self.past = self.step(*args)
        difference = np.max(np.abs(np.asarray(logits) - np.asarray(expected)))
        self.error = float(difference / np.max(np.abs(expected)))

    def __call__(self) -> None:
        logits, self.past = self.step(self.model, *self.token, self.past)
        logits.block_until_ready()

    def row(self, times: Times) -> Decoding:
        leaves = jtu.tree_leaves(self.model, is_leaf=is_quantized)
        weights = [a for a in leaves if is_quantized(a)] or leaves
        memory = self.compiled.memory_analysis()
        return Decoding(
            name=self.name,
            parameters=sum(a.size for a in leaves),
            bits_per_weight=8 * _nbytes(weights) / sum(a.size for a in weights),
            nbytes=_nbytes(leaves),
            times=times,
            temporary_bytes=None if memory is None else memory.temp_size_in_bytes,
            error=self.error,
            compile_seconds=self.compile_seconds,
        )


def _kernels(model: Decoder) -> set[str | None]:
    """Returns the names of the kernels for the weights of a model."""
    weights = {a.shape: a for a in _quantized(model)}
    x = lambda a: jax.ShapeDtypeStruct((1, a.shape[1]), jnp.float32)
    return {explain(x(a), a.T).kernel for a in weights.values()}


def _layouts(model: Decoder) -> list[Any]:
    return [a.layout for a in _quantized(model)]


def _quantized(model: Decoder) -> list[QuantizedArray]:
    leaves = jtu.tree_leaves(model, is_leaf=is_quantized)
    return [a for a in leaves if is_quantized(a)]


def _nbytes(arrays):
    return sum(a.nbytes for a in arrays)
