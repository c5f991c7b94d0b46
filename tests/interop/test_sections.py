"""Each layout reads its own section of `config.json`."""

import mlx.core as mx
import numpy as np
import pytest

from eqquant import interop

from . import files
from .test_readers import dense


_foreign = [
    {"quant_method": "fp8"},
    {"quant_method": "gptq", "bits": 2, "group_size": 128},
    {"quant_method": "awq", "bits": 8, "group_size": 32},
    {"quant_method": "mlx-like", "bits": 3, "a": {"bits": 2, "group_size": 128}},
]


@pytest.mark.parametrize("foreign", _foreign, ids=lambda x: x["quant_method"])
@pytest.mark.parametrize("bits, size", [(8, 32), (4, 64), (3, 64)])
@pytest.mark.parametrize("first", [True, False])
def test_mlx_beside_the_section_of_another(foreign, bits, size, first, path):
    w = mx.random.normal((8, 128), key=mx.random.key(0))
    parts = [np.array(x) for x in mx.quantize(w, group_size=size, bits=bits)]
    tensors = dict(zip(("a.weight", "a.scales", "a.biases"), parts))
    own = {"quantization": {"group_size": size, "bits": bits}}
    foreign = {"quantization_config": foreign}
    files.save(path, tensors, foreign | own if first else own | foreign)
    q = interop.open(path)["a.weight"]
    assert (q.shape, q.format.bits, q.block_size) == ((8, 128), bits, size)
    exact = mx.dequantize(*map(mx.array, parts), group_size=size, bits=bits)
    np.testing.assert_allclose(dense(q), np.array(exact), rtol=1e-6, atol=1e-6)


def test_mlx_under_the_other_name(path):
    # As MLX's copy of its section.
    rows, scales = np.zeros((2, 16), np.uint32), np.ones((2, 2), np.float32)
    tensors = {"a.weight": rows, "a.scales": scales, "a.biases": scales}
    files.save(path, tensors, {"quantization_config": {"group_size": 32, "bits": 8}})
    assert interop.open(path).entries["a.weight"].shape == (2, 64)


def test_others_beside_the_section_of_mlx(path):
    tensors, config, expected = files.gptq(n=32, k=96, bits=3, version=2)
    mlx = {"quantization": {"bits": 8, "group_size": 32}}
    for both in (config | mlx, mlx | config):
        files.save(path, tensors, both)
        ((name, w),) = expected.items()
        np.testing.assert_array_equal(dense(interop.open(path)[name]), w)
