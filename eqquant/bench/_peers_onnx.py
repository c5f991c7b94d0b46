import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from ._candidate import Candidate, Compiled


_block = 64


def onnxruntime(w: Float[np.ndarray, "k n"]) -> Candidate:
    """Of the operator `MatMulNBits`, whose codes are unsigned, and 8 is zero."""
    library = importlib.import_module("onnxruntime")
    k, n = w.shape
    blocks = np.zeros((n, -(-k // _block) * _block), np.float32)
    blocks[:, :k] = w.T
    blocks = blocks.reshape(n, -1, _block)
    scale = np.max(np.abs(blocks), axis=-1, keepdims=True) / 7
    codes = np.round(blocks / np.where(scale == 0, 1, scale)).astype(np.int8) + 8
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    model = _model(k, n, packed, scale.reshape(n, -1))
    session = lambda model: library.InferenceSession(
        model, providers=["CPUExecutionProvider"]
    )
    decoded = ((codes - 8) * scale).reshape(n, -1)[:, :k].T
    return Candidate(
        weight=session(model),
        nbytes=packed.nbytes + scale.nbytes,
        decoded=lambda: decoded,
        fn=lambda x, session: session.run(None, {"x": x})[0],
        operand=lambda x: x,
        compile=_eager,
        copy=lambda _: session(model),
    )


def _model(k, n, packed, scale):
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
        bits=4,
        block_size=_block,
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
