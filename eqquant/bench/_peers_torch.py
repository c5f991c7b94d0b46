import copy
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from ._candidate import Candidate, Compiled


def bitsandbytes(w: Float[np.ndarray, "k n"]) -> Candidate:
    torch = importlib.import_module("torch")
    library = importlib.import_module("bitsandbytes")
    functional = library.functional
    weight = functional.quantize_4bit(
        torch.from_numpy(w.T.copy()), blocksize=64, quant_type="nf4"
    )
    codes, state = weight
    return Candidate(
        weight=weight,
        nbytes=codes.nbytes + state.absmax.nbytes,
        decoded=lambda: functional.dequantize_4bit(*weight).numpy().T,
        fn=lambda x, w: library.matmul_4bit(x, w[0].t(), w[1]),
        operand=lambda x: torch.from_numpy(x.copy()),
        compile=_eager,
        copy=copy.deepcopy,
    )


def torchao(config: str) -> Callable[[Float[np.ndarray, "k n"]], Candidate]:
    def make(w):
        torch = importlib.import_module("torch")
        library = importlib.import_module("torchao.quantization")
        n, k = w.T.shape
        linear = torch.nn.Linear(k, n, bias=False, device="meta")
        dense = torch.from_numpy(w.T.copy())
        linear.weight = torch.nn.Parameter(dense, requires_grad=False)
        layer = torch.nn.Sequential(linear)
        library.quantize_(layer, getattr(library, config)())
        weight = layer[0].weight
        return Candidate(
            weight=layer,
            nbytes=weight.qdata.nbytes + weight.scale.nbytes,
            decoded=lambda: weight.dequantize().numpy().T,
            fn=lambda x, layer: layer(x),
            operand=lambda x: torch.from_numpy(x.copy()),
            compile=_eager,
            copy=copy.deepcopy,
        )

    return make


def _eager(fn: Callable[[Any, Any], Any], x: Any, weight: Any) -> Compiled:
    del x, weight
    torch = importlib.import_module("torch")

    def call(x, weight):
        with torch.inference_mode():
            return fn(x, weight)

    return Compiled(call, None, None)
