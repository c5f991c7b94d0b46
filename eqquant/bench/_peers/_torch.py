import copy
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from .._candidate import Candidate, Compiled


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


def bitsandbytes_bfloat16(w: Float[np.ndarray, "k n"]) -> Candidate:
    """Returns the layer of bitsandbytes, which repacks its codes on CPUs with bfloat16
    products."""
    torch = importlib.import_module("torch")
    library = importlib.import_module("bitsandbytes")
    n, k = w.T.shape
    layer = library.nn.Linear4bit(
        k, n, bias=False, compute_dtype=torch.bfloat16, device="meta"
    )
    layer.weight = library.nn.Params4bit(
        torch.from_numpy(w.T.copy()).bfloat16(),
        requires_grad=False,
        blocksize=64,
        compress_statistics=False,
        quant_type="nf4",
    )
    layer = layer.to("cpu").eval()
    codes, state = layer.weight.data, layer.weight.quant_state
    decoded = library.functional.dequantize_4bit(codes, state).float().numpy().T
    return Candidate(
        weight=layer,
        nbytes=codes.nbytes + state.absmax.nbytes,
        decoded=lambda: decoded,
        fn=lambda x, layer: layer(x),
        operand=_bfloat16,
        result=_float32,
        compile=_eager,
        copy=copy.deepcopy,
    )


def int8(w: Float[np.ndarray, "k n"]) -> Candidate:
    """Returns a product with 8-bit codes and a scale for each column."""
    torch = importlib.import_module("torch")
    dense = torch.from_numpy(w.T.copy())
    scale = (dense.abs().amax(1) / 127).bfloat16()
    units = scale.float()[:, None]
    codes = (dense / units).round().clamp(-127, 127).to(torch.int8)
    return Candidate(
        weight=(codes, scale),
        nbytes=codes.nbytes + scale.nbytes,
        decoded=lambda: (codes * units).numpy().T,
        fn=lambda x, w: torch.ops.aten._weight_int8pack_mm(x, *w),
        operand=_bfloat16,
        result=_float32,
        compile=_eager,
        copy=copy.deepcopy,
    )


def int4(w: Float[np.ndarray, "k n"]) -> Candidate:
    """Returns a product with unsigned 4-bit codes, where 8 stands for zero, and a scale
    and a shift for each block of 64."""
    torch = importlib.import_module("torch")
    n, k = w.T.shape
    blocks = torch.from_numpy(w.T.copy()).unflatten(1, (-1, 64))
    scale = (blocks.abs().amax(-1) / 7).bfloat16()
    units = scale.float()[..., None]
    codes = (blocks / units).round().clamp(-8, 7).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        (codes + 8).reshape(n, k), 1
    )
    shifts = torch.stack([scale.T, torch.zeros_like(scale.T)], -1).contiguous()
    return Candidate(
        weight=(packed, shifts),
        nbytes=packed.nbytes + shifts.nbytes,
        decoded=lambda: (codes * units).reshape(n, k).numpy().T,
        fn=lambda x, w: torch.ops.aten._weight_int4pack_mm_for_cpu(x, w[0], 64, w[1]),
        operand=_bfloat16,
        result=_float32,
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


def _bfloat16(x):
    torch = importlib.import_module("torch")
    return torch.from_numpy(x.copy()).bfloat16()


def _float32(y):
    return y.float().numpy()


def _eager(fn: Callable[[Any, Any], Any], x: Any, weight: Any) -> Compiled:
    del x, weight
    torch = importlib.import_module("torch")

    def call(x, weight):
        with torch.inference_mode():
            return fn(x, weight)

    return Compiled(call, None, None)
