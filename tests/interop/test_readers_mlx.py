import json

import mlx.core as mx
import numpy as np
import pytest

from eqquant import interop

from . import files
from .test_readers import dense


@pytest.mark.examples(4)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_mlx(bits, size, path):
    dtype = {32: mx.float32, 64: mx.float16, 128: mx.bfloat16}[size]
    w = mx.random.normal((2, 8, 256), key=mx.random.key(bits)).astype(dtype)
    weight, scales, biases = mx.quantize(w, group_size=size, bits=bits)
    arrays = {"a.weight": weight, "a.scales": scales, "a.biases": biases}
    mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    config = {"quantization": {"group_size": 64, "bits": 4}}
    if (size, bits) != (64, 4):
        config["quantization"]["a"] = {"group_size": size, "bits": bits}
    path.with_name("config.json").write_text(json.dumps(config))
    q = interop.open(path)["a.weight"]
    assert q.shape == (2, 8, 256) and q.format.bits == bits and q.block_size == size
    exact = mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32),
                          group_size=size, bits=bits)  # fmt: skip
    np.testing.assert_allclose(dense(q), np.array(exact), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_mlx_floating_point(mode, path):
    w = mx.random.normal((8, 128), key=mx.random.key(0))
    weight, scales = mx.quantize(w, mode=mode)
    mx.save_safetensors(str(path), {"a.weight": weight, "a.scales": scales})
    q = interop.read_mlx(path)["a.weight"]
    exact = mx.dequantize(weight, scales, mode=mode, dtype=mx.float32)
    np.testing.assert_array_equal(dense(q), np.array(exact))


def test_mlx_without_configuration(path):
    rows = np.zeros((2, 16), np.uint32)
    scales = np.ones((2, 2), np.float32)
    files.save(path, {"a.weight": rows, "a.scales": scales, "a.biases": scales})
    # As MLX has it if it is not told otherwise.
    assert interop.open(path).entries["a.weight"].shape == (2, 128)
    q = interop.read_mlx(path, bits=8, group_size=32)["a.weight"]
    assert q.shape == (2, 64) and q.format.bits == 8
    files.save(path, {"a.weight": rows[:, :8], "a.scales": scales, "a.biases": scales})
    with pytest.raises(ValueError, match="'a.weight' has 128 bits per scale.*config"):
        interop.open(path)
    assert interop.read_mlx(path, bits=2, group_size=64)["a.weight"].shape == (2, 128)


def test_mlx_with_a_scale_of_all(path):
    w = mx.random.normal((8, 128), key=mx.random.key(0))
    one = mx.array(300.0)
    weight, scales = mx.quantize(w, mode="nvfp4", global_scale=one)
    parts = {"a.weight": weight, "a.scales": scales, "a.global_scale": one}
    mx.save_safetensors(str(path), parts)
    with pytest.raises(ValueError, match="'a.weight' .*, and no other.*'a.global_sc"):
        interop.open(path)


def test_mlx_of_one_bit(path):
    w = mx.random.normal((4, 256), key=mx.random.key(0))
    parts = mx.quantize(w, bits=1, group_size=64)
    arrays = dict(zip(("a.weight", "a.scales", "a.biases"), parts))
    mx.save_safetensors(str(path), arrays)
    with pytest.raises(ValueError, match=r"64 bits per scale.*\(2, 32\), \(1, 64\)"):
        interop.open(path)
    with pytest.raises(ValueError, match="'a.weight' has 1-bit codes"):
        interop.read_mlx(path, bits=1, group_size=64)
