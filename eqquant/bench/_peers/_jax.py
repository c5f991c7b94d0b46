import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Float

from .._candidate import as_float32, Candidate


def eformer(array_class: str) -> Callable[[Float[np.ndarray, "k n"]], Candidate]:
    def make(w):
        arrays = importlib.import_module("eformer.ops.quantization")
        implicit = importlib.import_module("eformer.jaximus").implicit
        weight = getattr(arrays, array_class).quantize(jnp.asarray(w))
        return Candidate(
            weight=weight,
            nbytes=_nbytes(weight),
            decoded=lambda: as_float32(weight.materialize()),
            fn=implicit(lambda x, w: x @ w),
        )

    return make


def qwix(
    dtype: str, *, tile: int | None = None, rows: bool = False
) -> Callable[[Float[np.ndarray, "k n"]], Candidate]:
    def make(w):
        library = importlib.import_module("qwix")

        def product(x, w):
            x = library.quantize(x, dtype, channelwise_axes=(0,)) if rows else x
            return library.dot(x, w)

        @jax.jit
        def quantize(w):
            tiles = {} if tile is None else {0: tile}
            return library.quantize(w, dtype, channelwise_axes=(1,), tiled_axes=tiles)

        weight = quantize(jnp.asarray(w))
        return Candidate(
            weight=weight,
            nbytes=_nbytes(weight),
            decoded=lambda: as_float32(library.dequantize(weight)),
            fn=product,
        )

    return make


def _nbytes(weight: Any) -> int:
    # The size on the device, where an int4 takes half a byte.
    return sum(a.on_device_size_in_bytes() for a in jtu.tree_leaves(weight))
