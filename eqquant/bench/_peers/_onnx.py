import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from .._candidate import Candidate, Compiled


_block = 64


def onnxruntime(
    bits: int, rows: bool
) -> Callable[[Float[np.ndarray, "k n"]], Candidate]:
    """Returns a maker of candidates by the operator `MatMulNBits`, with unsigned codes,
    whose middle stands for zero. If `rows`, it may quantize the rows to 8 bits."""

    def make(w):
        library = importlib.import_module("onnxruntime")
        k, n = w.shape
        zero = 1 << bits - 1
        blocks = np.zeros((n, -(-k // _block) * _block), np.float32)
        blocks[:, :k] = w.T
        blocks = blocks.reshape(n, -1, _block)
        scale = np.max(np.abs(blocks), axis=-1, keepdims=True) / np.float32(zero - 1)
        codes = np.round(blocks / np.where(scale == 0, 1, scale))
        decoded = (codes * scale).reshape(n, -1)[:, :k].T
        packed = (codes + zero).astype(np.uint8)
        if bits == 4:
            packed = packed[..., ::2] | packed[..., 1::2] << 4
        model = _model(k, n, bits, rows, packed, scale.reshape(n, -1))
        session = lambda: library.InferenceSession(
            model, providers=["CPUExecutionProvider"]
        )
        return Candidate(
            weight=session(),
            nbytes=packed.nbytes + scale.nbytes,
            decoded=lambda: decoded,
            fn=lambda x, session: session.run(None, {"x": x})[0],
            operand=lambda x: x,
            compile=_eager,
            copy=lambda _: session(),
        )

    return make


def _model(k, n, bits, rows, packed, scale):
    onnx = importlib.import_module("onnx")
    helper, real = onnx.helper, onnx.TensorProto.FLOAT
    array = importlib.import_module("onnx.numpy_helper").from_array
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scale"],
        ["y"],
        domain="com.microsoft",
        K=k,
        N=n,
        bits=bits,
        block_size=_block,
        # The precision of the rows: unspecified, or 8 bits.
        accuracy_level=4 if rows else 0,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", real, ["m", k])],
        [helper.make_tensor_value_info("y", real, ["m", n])],
        [array(packed, "codes"), array(scale.ravel(), "scale")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model.SerializeToString()


def _eager(fn: Callable[[Any, Any], Any], x: Any, weight: Any) -> Compiled:
    del x, weight
    return Compiled(fn, None, None)
