import dataclasses
import json

import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqquant as eqq
from eqquant import interop

from ..helpers import normal
from ..raises import raises
from .arrays import dense, quantized
from .same import same


_half = jnp.float16
_sizes = {32: mx.float32, 64: mx.float16, 128: mx.bfloat16}


#
# MLX
#


def test_mlx(tmp_path):
    schemes = {
        f"{bits}.{size}": (bits, size, "affine")
        for bits, size in zip((2, 3, 4, 5, 6, 8), [*_sizes] * 2)
    }
    schemes |= {"mxfp4": (4, 32, "mxfp4"), "mxfp8": (8, 32, "mxfp8")}
    arrays, quantization = {"norm.weight": mx.ones(3)}, {}
    for layer, (bits, size, mode) in schemes.items():
        scheme = {"bits": bits, "group_size": size, "mode": mode}
        w = mx.random.normal((2, 4, 256), dtype=_sizes[size], key=mx.random.key(0))
        parts = mx.quantize(w, **scheme)
        arrays |= zip([f"{layer}.weight", f"{layer}.scales", f"{layer}.biases"], parts)
        quantization[layer] = scheme
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    config = {"model_type": "test", "quantization": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = interop.open(tmp_path)

    again = tmp_path / "again"
    again.mkdir()
    (again / "config.json").write_text('{"model_type": "test"}')
    interop.write_mlx(again, checkpoint)
    config = json.loads((again / "config.json").read_text())
    assert config["model_type"] == "test"
    found = mx.load(str(again / "model.safetensors"))
    assert found.keys() == arrays.keys()
    for name, x in arrays.items():
        assert x.dtype == found[name].dtype and mx.array_equal(x, found[name])
    usual = config["quantization"]
    for layer, scheme in quantization.items():
        said = usual.get(layer, usual)
        assert {key: said[key] for key in scheme} == scheme
    for name, x in interop.open(again).items():
        assert same(x, checkpoint[name])


def test_mlx_of_what_was_quantized_here(tmp_path):
    q = quantized(eqq.Int(4, 32, "minimum"), 4, 64)
    interop.write_mlx(tmp_path / "a.safetensors", {"a.weight": q})
    x = mx.load(str(tmp_path / "a.safetensors"))
    w = mx.dequantize(x["a.weight"], x["a.scales"], x["a.biases"], 32, 4)
    np.testing.assert_allclose(np.array(w), dense(q), atol=1e-6)
    config = json.loads((tmp_path / "a.config.json").read_text())
    scheme = {"group_size": 32, "bits": 4, "mode": "affine"}
    assert config == {"quantization": scheme}


#
# What no package reads back here, but this one does. (See `by_torch.py`.)
#


@pytest.mark.examples(3)
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("offset", [None, "zero_point"])
def test_gptq(bits, offset, tmp_path):
    path = tmp_path / "a.safetensors"
    format = eqq.Int(bits, 32, offset, scale_dtype=_half)
    tensors = {"a.weight": quantized(format, 32, 96), "a.bias": normal(32)}
    interop.write_gptq(path, tensors)
    config = json.loads((tmp_path / "a.config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "sym": offset is None,
        "desc_act": False,
        "checkpoint_format": "gptq_v2",
    }
    checkpoint = interop.read_gptq(path)
    for name, x in tensors.items():
        np.testing.assert_array_equal(dense(checkpoint[name]), dense(x))


# Where a file has no zero-points, they are the middle of the codes.
def test_gptq_without_zero_points(tmp_path):
    path = tmp_path / "a.safetensors"
    x = quantized(eqq.Int(8, 32, scale_dtype=_half), 32, 96)
    interop.write_gptq(path, {"a.weight": x})
    arrays = load_file(path)
    del arrays["a.qzeros"]
    save_file(arrays, path)
    np.testing.assert_array_equal(dense(interop.read_gptq(path)["a.weight"]), dense(x))


def test_bitsandbytes(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {
        "a.weight": quantized(eqq.NF4(64), 8, 128),
        "b.weight": quantized(eqq.formats.BnbFP4(128), 8, 128, dtype=jnp.bfloat16),
        "c": eqq.quantize(normal(7, 33), eqq.NF4(64), axis=(-2, -1)),
        "nested": quantized(
            eqq.Nested(eqq.formats.BnbFP4(64), eqq.formats.BnbScale(32)), 24, 128
        ),
        "d.bias": normal(3),
    }
    interop.write_bitsandbytes(path, tensors)
    checkpoint = interop.read_bitsandbytes(path)
    assert all(same(checkpoint[name], x) for name, x in tensors.items())


def test_compressed_tensors(tmp_path):
    formats = [
        *(eqq.Int4(32), eqq.Int4(None, False, jnp.bfloat16), eqq.Int8(32, _half)),
        *(eqq.Int(3, 32), eqq.Int(5, 48, "zero_point")),
        *(eqq.FP8("e4m3"), eqq.FP8("e4m3", scale="tensor")),
    ]
    tensors = {
        f"{i}.weight": quantized(format, 12, 100, dtype=format.scale_dtype)
        for i, format in enumerate(formats)
    }
    bfloat16 = jnp.bfloat16
    tensors |= {
        "m.weight": quantized(eqq.MXFP4(), 4, 64, dtype=bfloat16),
        "n.weight": quantized(eqq.NVFP4(inverse=True), 4, 64, dtype=bfloat16),
        "norm.weight": normal(4),
    }
    interop.write_compressed_tensors(tmp_path / "model", tensors)
    checkpoint = interop.read_compressed_tensors(tmp_path / "model")
    assert all(same(checkpoint[name], x) for name, x in tensors.items())


def test_order_of_groups(tmp_path):
    # As a file has it, for `quantize` leaves them in order.
    q = quantized(eqq.Int(4, 32, "zero_point", True, _half), 32, 96)
    block = jnp.asarray(np.random.default_rng(0).permutation(96) // 32, jnp.int32)
    stored = q.stored | {"block": block.reshape(q.stored["block"].shape)}
    q = dataclasses.replace(q, stored=stored).astype(_half)
    for write in (interop.write_gptq, interop.write_compressed_tensors):
        write(tmp_path / "a.safetensors", {"a.weight": q})
        assert same(interop.open(tmp_path / "a.safetensors")["a.weight"], q)


#
# What cannot be written
#


@pytest.mark.parametrize(
    "write, name, make, match",
    [
        (
            interop.write_gguf,
            "a",
            lambda: quantized(eqq.NF4(), 4, 64),
            "NF4.*GGUF: it has",
        ),
        (interop.write_gguf, "a", lambda: quantized("q4_0", 4, 40), "a multiple of 32"),
        (
            interop.write_gguf,
            "a",
            lambda: eqq.quantize(normal(64, 4), "q4_0"),
            "`w @ x`",
        ),
        (interop.write_gguf, "a", lambda: jnp.ones(3, bool), "it is of bool"),
        (interop.write_gguf, "a", lambda: jnp.ones((1, 1, 1, 1, 1)), "4 axes"),
        (
            interop.write_mlx,
            "a.weight",
            lambda: quantized(eqq.Int4(), 4, 64),
            "for MLX",
        ),
        (
            interop.write_mlx,
            "a.weight",
            lambda: quantized(eqq.Int(4, 64), 4, 64),
            "for MLX",
        ),
        (
            interop.write_mlx,
            "a",
            lambda: quantized(eqq.MXFP4(), 4, 64),
            "end with '.weight'",
        ),
        (
            interop.write_gptq,
            "a.weight",
            lambda: quantized(eqq.Int4(), 32, 64),
            "scale_dtype",
        ),
        (
            interop.write_gptq,
            "a.weight",
            lambda: quantized(eqq.Int4(scale_dtype=_half), 33, 64),
            "fill words",
        ),
        (
            interop.write_gptq,
            "a.weight",
            lambda: quantized(eqq.Int(4, 32, "minimum", scale_dtype=_half), 32, 64),
            "for GPTQ",
        ),
        (
            interop.write_bitsandbytes,
            "a",
            lambda: quantized(eqq.NF4(48), 4, 96),
            "powers of two",
        ),
        (
            interop.write_bitsandbytes,
            "a",
            lambda: quantized(eqq.NF4(64), 4, 96),
            "a multiple of 64",
        ),
        (
            interop.write_bitsandbytes,
            "a",
            lambda: quantized(eqq.Nested(eqq.NF4(64), eqq.Int8(32)), 4, 128),
            "`BnbScale",
        ),
        (
            interop.write_bitsandbytes,
            "a",
            lambda: quantized(
                eqq.Nested(eqq.NF4(64), eqq.formats.BnbScale(32)), 2, 4, 128
            ),
            "need a matrix",
        ),
        (
            interop.write_compressed_tensors,
            "a.weight",
            lambda: quantized(eqq.NF4(64), 4, 64),
            "for compressed-tensors",
        ),
        (
            interop.write_gptq,
            "a.weight",
            lambda: quantized(eqq.Rotated(eqq.Int4(64)), 8, 64),
            "Rotated",
        ),
        (
            interop.write_gguf,
            "a.weight",
            lambda: quantized(eqq.Rotated(eqq.formats.Q4_0()), 4, 64),
            "Rotated",
        ),
    ],
)
def test_formats_that_cannot_be_written(write, name, make, match, tmp_path):
    with pytest.raises(ValueError, match=f"'{name}'.*{match}"):
        write(tmp_path / "model.safetensors", {name: make(), "b": normal(2)})
    assert not list(tmp_path.iterdir())


def test_names_that_meet(tmp_path):
    q = quantized(eqq.MXFP4(), 4, 64)
    with pytest.raises(ValueError, match="'a.weight' and 'a.scales' would both"):
        interop.write_mlx(tmp_path / "a", {"a.weight": q, "a.scales": normal(2)})


def test_of_different_bits(tmp_path):
    each = [quantized(eqq.Int(b, 32, scale_dtype=_half), 32, 64) for b in (3, 4)]
    with pytest.raises(ValueError, match="the same bits.*'0.weight'.*'1.weight'"):
        interop.write_gptq(
            tmp_path / "a", {f"{i}.weight": q for i, q in enumerate(each)}
        )


def test_a_model(tmp_path):
    import equinox as eqx

    mlp = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    model = eqq.tree_quantize(mlp, eqq.formats.Q8_0())
    interop.write_gguf(tmp_path / "a.gguf", model)
    loaded = interop.load_into(mlp, interop.open(tmp_path / "a.gguf"))
    assert same(loaded, model)


#
# What matters to encoding alone
#


def test_rounding_does_not_decide_what_can_be_written(tmp_path):
    import gguf

    w = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    arrays = {
        f"{ties}.weight": eqq.quantize(w, eqq.MXFP4(ties=ties), axis=-1)
        for ties in ("even", "zero")
    }
    interop.write_gguf(tmp_path / "a.gguf", arrays)
    kind = gguf.GGMLQuantizationType.MXFP4
    for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors:
        assert tensor.tensor_type == kind
        expected = dense(arrays[tensor.name])
        np.testing.assert_array_equal(gguf.dequantize(tensor.data, kind), expected)
        if tensor.name == "zero.weight":
            # The very bytes of ggml.
            np.testing.assert_array_equal(tensor.data, gguf.quantize(w, kind))
    for layout in ("mlx", "compressed-tensors"):
        folder = tmp_path / layout
        interop.write(folder, arrays, layout)
        for name, x in interop.open(folder).items():
            assert x.format == eqq.MXFP4()
            np.testing.assert_array_equal(dense(x), dense(arrays[name]))
    found = mx.load(str(tmp_path / "mlx" / "model.safetensors"))
    parts = (found["zero.weight"], found["zero.scales"])
    exact = mx.dequantize(*parts, mode="mxfp4", dtype=mx.float32)
    np.testing.assert_array_equal(np.array(exact), dense(arrays["zero.weight"]))


def test_nothing_to_write(tmp_path):
    for tensors in (3, "model", {"a": 2.0}, [jnp.tanh]):
        with raises(TypeError, "tensors", f"no array in {type(tensors).__name__}"):
            interop.write(tmp_path / "model", tensors, "mlx")
        with raises(TypeError, "tensors", f"no array in {type(tensors).__name__}"):
            interop.write_gguf(tmp_path / "a.gguf", tensors)
    assert not list(tmp_path.iterdir())
