"""Scales that are powers of two, those of ModelOpt, and 8-bit codes whose groups are
not in order: against products in NumPy."""

import ml_dtypes
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant._cli import main

from . import files
from .test_readers import check, dense


def _fp8(shape, block, name):
    """8-bit floats in blocks of rows and columns, with scales of 8 bits of exponent."""
    rng = np.random.default_rng(0)
    *lead, n, k = shape
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    of_scales = (*lead, -(-n // block[0]), -(-k // block[1]))
    exponents = rng.integers(110, 140, of_scales).astype(np.uint8)
    scales = np.exp2(exponents.astype(np.float32) - 127)
    spread = np.repeat(np.repeat(scales, block[0], -2), block[1], -1)[..., :n, :k]
    tensors = {
        "q.weight": codes,
        f"q.{name}": exponents.view(ml_dtypes.float8_e8m0fnu),
    }
    config = {"quantization_config": {"quant_method": "fp8"}}
    return tensors, config, {"q.weight": codes.astype(np.float32) * spread}


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize(
    "shape, block",
    [
        ((256, 256), (128, 128)),
        ((200, 300), (128, 128)),
        ((2, 130, 64), (128, 128)),
        ((40, 96), (40, 96)),
        ((40, 96), (1, 96)),
        ((40, 96), (1, 32)),
    ],
)
def test_powers_of_two(shape, block, name, path):
    made = _fp8(shape, block, name)
    q = check(path, made, interop.read_compressed_tensors, (eqq.FP8, eqq.MXFP8))
    assert isinstance(q.format, eqq.MXFP8) == (block == (1, 32))


def test_command_with_powers_of_two(tmp_path):
    tensors, config, expected = _fp8((256, 256), (128, 128), "weight_scale_inv")
    files.save(tmp_path / "model.safetensors", tensors, config)
    out = tmp_path / "out"
    options = ["--format", "int8", "--requantize", "--min-size", "0"]
    assert main(["quantize", str(tmp_path), str(out), *options]) == 0
    w, found = expected["q.weight"], dense(eqq.load(out)["q"]["weight"])
    assert np.linalg.norm(found - w) < 0.02 * np.linalg.norm(w)


@pytest.mark.parametrize("stack, whole", [((), ()), ((), (1,)), ((2,), (2,))])
def test_nvfp4_of_modelopt(stack, whole, path):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (*stack, 24, 64)).astype(np.uint8)
    scales = rng.uniform(1, 400, (*stack, 24, 4)).astype(ml_dtypes.float8_e4m3fn)
    of_all = rng.uniform(0.001, 1, whole).astype(ml_dtypes.bfloat16)
    of_all = np.asarray(of_all).astype(np.float32)
    tensors = {
        "q.weight": codes[..., ::2] | codes[..., 1::2] << 4,
        "q.weight_scale": scales,
        "q.weight_scale_2": of_all,
    }
    spread = np.repeat(scales.astype(np.float32), 16, axis=-1)
    spread = spread * (of_all.reshape(2, 1, 1) if stack else of_all)
    points = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    w = np.concatenate([points, -points])[codes] * spread
    config = {"quantization_config": {"quant_method": "modelopt"}}
    read = lambda path: interop.open(path, "modelopt")
    check(path, (tensors, config, {"q.weight": w}), read, eqq.NVFP4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("order", [None, "groups", "random"])
def test_groups_of_8_bit_integers(symmetric, order, path):
    tensors, config, _ = files.compressed8((40, 3))
    rng = np.random.default_rng(1)
    index = np.arange(96) // 32
    if order is not None:
        index = rng.permutation(index) if order == "random" else index
        tensors["q.weight_g_idx"] = index.astype(np.int32)
    low = np.zeros((40, 3), np.float32)
    if not symmetric:
        tensors["q.weight_zero_point"] = rng.integers(-128, 128, (40, 3), np.int8)
        low = tensors["q.weight_zero_point"].astype(np.float32)
    codes, scale = tensors["q.weight"].astype(np.float32), tensors["q.weight_scale"]
    expected = {"q.weight": (codes - low[:, index]) * scale[:, index]}
    read = interop.read_compressed_tensors
    q = check(path, (tensors, config, expected), read, (eqq.Int, eqq.Int8))
    assert isinstance(q.format, eqq.Int8) == (symmetric and order != "random")
    tensors["q.weight_g_idx"] = np.zeros(95, np.int32)
    files.save(path, tensors, config)
    with pytest.raises(ValueError, match="'q.weight' should have a group for each"):
        interop.open(path)


def test_groups_of_8_bit_floats(path):
    tensors, config, expected = files.compressed8((40, 3), kind="float")
    index = np.arange(96, dtype=np.int32) // 32
    made = tensors | {"q.weight_g_idx": index}, config, expected
    check(path, made, interop.read_compressed_tensors, eqq.FP8)
    files.save(path, tensors | {"q.weight_g_idx": index[::-1]}, config)
    with pytest.raises(ValueError, match="'q.weight' has groups in another order"):
        interop.open(path)
