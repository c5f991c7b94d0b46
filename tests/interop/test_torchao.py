"""Arrays of torchao against its own decoded values.

`data/torchao.safetensors` was written with torchao 0.18.0 and torch 2.13.0, from random
weights, by its `flatten_tensor_state_dict`; `data/torchao.npz` has what its tensors'
`dequantize` gives. Its `Int4Tensor` is made on GPUs alone: that test follows the
definition of fbgemm's `int4_row_quantize_zp`.
"""

import json
import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop

from ..helpers import normal
from . import files


data = pathlib.Path(__file__).parents[1] / "data"
sample = data / "torchao.safetensors"
bf16 = jnp.bfloat16
formats = {
    "int8": eqq.Int8(),
    "int8_dynamic": eqq.Int8(),
    "int1_groups": eqq.Int(2, 32, scale_dtype=bf16),
    "int2_groups": eqq.Int(2, 32, scale_dtype=bf16),
    "int3_groups": eqq.Int(3, 32, scale_dtype=bf16),
    "int4_groups": eqq.Int4(32, scale_dtype=bf16),
    "int5_groups": eqq.Int(5, 32, scale_dtype=bf16),
    "int8_groups": eqq.Int8(32, scale_dtype=bf16),
    "int3_affine": eqq.Int(3, 32, "zero_point"),
    "int4_affine": eqq.Int4(32, symmetric=False),
    "int8_affine": eqq.Int(8, 32, "zero_point"),
    "int4_rows": eqq.Int4(None, scale_dtype=bf16),
    "float8": eqq.FP8(),
    "float8_tensor": eqq.FP8(scale="tensor"),
    "mxfp8": eqq.MXFP8(),
    "mxfp8_e5m2": eqq.MXFP8("e5m2"),
    "mxfp4": eqq.MXFP4(),
    "mxfp4_tiles": eqq.MXFP4(),
    "nvfp4": eqq.NVFP4(),
    "nvfp4_tiles": eqq.NVFP4(),
}


def test_as_torchao_decodes():
    checkpoint = interop.open(sample)
    assert checkpoint.kind == "torchao"
    assert set(checkpoint) == {f"layers.{n}.weight" for n in formats} | {"norm.weight"}
    with np.load(data / "torchao.npz") as decoded:
        for name, format in formats.items():
            q = checkpoint[f"layers.{name}.weight"]
            assert q.format == format and q.axis == -1
            w = np.asarray(q.dequantize().astype(jnp.float32))
            np.testing.assert_array_equal(w, decoded[name], err_msg=name)
    x, q = normal(2, 64), checkpoint["layers.mxfp8.weight"].astype(jnp.float32)
    np.testing.assert_allclose(x @ q.mT, x @ q.dequantize().T, rtol=1e-4, atol=1e-4)


def test_int4(tmp_path):
    random = np.random.default_rng(0)
    codes = random.integers(-8, 8, (2, 24, 64))
    scale, zero = random.normal(size=(2, 2, 2, 24)).astype(ml_dtypes.bfloat16)
    of_numbers = lambda a: np.repeat(np.float32(a).swapaxes(-1, -2), 32, -1)
    arrays = {
        "a._w_qdata": (codes[..., 1::2] << 4 | codes[..., ::2] & 15).astype(np.int8),
        "a._w_scale": scale,
        "a._w_zero_point": zero,
    }
    about = {"_type": "Int4Tensor", "_data": {"block_size": [1, 1, 32]}}
    path = tmp_path / "model.safetensors"
    files.save(path, arrays, metadata={"a.w": json.dumps(about)})
    q = interop.open(path)["a.w"]
    assert q.format == eqq.Int(4, 32, "minimum") and q.dtype == jnp.bfloat16
    wanted = codes * of_numbers(scale) + of_numbers(zero)
    np.testing.assert_allclose(q.astype(jnp.float32).dequantize(), wanted, 1e-6, 1e-6)


def changed(tensors, metadata, name, **changes):
    about = json.loads(metadata[name])
    about["_data"] |= changes
    return tensors, metadata | {name: json.dumps(about)}


def _resized(part):
    def damage(tensors, metadata, name):
        key = name.replace("weight", f"_weight_{part}")
        return tensors | {key: tensors[key][:-1]}, metadata

    return damage


damages = [
    ("int8", lambda t, m, n: (t, {}), "metadata of the file does not name its class"),
    ("int8", lambda t, m, n: (t, m | {n: "{"}), "is not JSON"),
    ("int8", lambda t, m, n: (t, m | {n: "[1]"}), "should be a JSON object"),
    (
        "int8",
        lambda t, m, n: (t, m | {n: '{"_type": "X"}'}),
        "should be one of torchao",
    ),
    ("int8", lambda *x: changed(*x, dtype=3), "should have a torch.dtype for 'dtype'"),
    (
        "int8",
        lambda *x: changed(*x, dtype={"_data": "int8"}),
        "of float32, float16 or bfloat16",
    ),
    (
        "int3_groups",
        lambda *x: changed(*x, target_dtype={"_data": "int9"}),
        "integers of 1 to 8 bits",
    ),
    (
        "int3_groups",
        lambda *x: changed(*x, target_dtype={"_data": "int2"}),
        "integers of 2 bits, from -2 to 1. Got -4 to 3",
    ),
    ("int3_affine", _resized("zero_point"), "a zero-point for each scale"),
    ("int3_groups", _resized("scale"), "zero-point for each scale"),
    ("mxfp4", lambda *x: changed(*x, block_size=16), "a scale for each 32 numbers"),
    (
        "mxfp4_tiles",
        lambda *x: changed(*x, is_swizzled_scales=False),
        "a scale for each 32",
    ),
    ("nvfp4_tiles", _resized("scale"), "a scale for each 16 numbers"),
    (
        "mxfp8",
        lambda *x: changed(*x, elem_dtype={"_data": "float8_e5m2"}),
        "codes of the dtype 'float8_e5m2'",
    ),
    (
        "int8",
        lambda t, m, n: (
            t | {"layers.int8._weight_act_pre_scale": t["norm.weight"]},
            m,
        ),
        "scales its inputs",
    ),
]


@pytest.mark.parametrize("name, damage, message", damages)
def test_damaged(name, damage, message, tmp_path):
    tensors, metadata = files.load(sample)
    mine = f"layers.{name}._", "norm"
    tensors = {part: x for part, x in tensors.items() if part.startswith(mine)}
    full = f"layers.{name}.weight"
    tensors, metadata = damage(tensors, metadata, full)
    path = tmp_path / "model.safetensors"
    files.save(path, tensors, metadata=metadata)
    with pytest.raises(ValueError, match=message) as error:
        interop.open(path)[full]
    assert full in str(error.value)


def test_parts_that_are_missing(path):
    tensors, metadata = files.load(sample)
    for part in (name for name in tensors if "._weight_" in name):
        prefix = part.partition("._weight_")[0]
        rest = {k: x for k, x in tensors.items() if k.startswith(f"{prefix}._")}
        del rest[part]
        files.save(path, rest, metadata=metadata)
        try:
            checkpoint = interop.open(path)
        except ValueError as e:
            assert f"'{prefix}.weight' should have {part!r}" in str(e)
            continue
        # Without its codes, or its scales, it is no array of torchao.
        assert part.endswith(("_qdata", "_scale")) and len(checkpoint) == len(rest)
        for name in rest:
            with pytest.raises(ValueError, match="part of a quantized array"):
                checkpoint[name]
