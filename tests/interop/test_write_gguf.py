import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop

from ..helpers import normal
from .arrays import dense, quantized
from .same import same


_half = jnp.float16
samples = pathlib.Path(__file__).parents[1] / "data" / "gguf_types.npz"

_ggml = {
    "Q4_0": eqq.formats.Q4_0(),
    "Q5_1": eqq.formats.Q5_1(),
    "Q8_0": eqq.formats.Q8_0(),
    "TQ1_0": eqq.formats.TQ1_0(),
    "MXFP4": eqq.MXFP4(),
}


def test_gguf(tmp_path):
    import gguf

    path = tmp_path / "a.gguf"
    tensors = {name: quantized(format, 4, 512) for name, format in _ggml.items()}
    tensors |= {
        "experts": quantized(eqq.formats.Q4_0(), 2, 3, 64),
        "f32": normal(3),
        "f16": normal(2, 3, dtype=_half),
        "bf16": normal(2, 3, 4, dtype=jnp.bfloat16),
    }
    metadata = {
        "general.architecture": "test",
        "general.alignment": 64,
        "text": "ü",
        "number": 3,
        "negative": -3,
        "large": 2**40,
        "float": 0.5,
        "flag": True,
        "list": [1, 2, -3],
        "words": ["a", ""],
        "scores": [0.5, 2.0],
        "flags": [True, False],
        "double": np.float64(0.1),
    }
    interop.write_gguf(path, tensors, metadata)
    checkpoint = interop.open(path)
    assert checkpoint.metadata == metadata
    assert set(checkpoint) == set(tensors)
    assert all(same(checkpoint[name], x) for name, x in tensors.items())

    reader = gguf.GGUFReader(path)
    fields = {key: reader.get_field(key).contents() for key in metadata}
    assert fields == metadata
    for tensor in reader.tensors:
        x = tensors[tensor.name]
        w = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(w.reshape(x.shape), dense(x))
        if eqq.is_quantized(x) and tensor.name != "experts":
            assert tensor.tensor_type.name == tensor.name
    # And once more, from the file.
    interop.write_gguf(tmp_path / "b.gguf", checkpoint, checkpoint.metadata)
    assert (tmp_path / "b.gguf").stat().st_size == path.stat().st_size


@pytest.mark.thorough
def test_gguf_by_the_package(tmp_path):
    import gguf

    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "test")
    writer.add_uint8("u8", 200)
    writer.add_float64("f64", 0.1)
    writer.add_array("tokens", ["a", "é"])
    writer.add_token_scores([0.5, -1.0])
    w = np.asarray(normal(8, 512))
    blocks = {}
    for name in ("Q4_1", "Q5_0", "TQ2_0"):
        type = gguf.GGMLQuantizationType[name]
        blocks[name] = gguf.quants.quantize(w, type)
        writer.add_tensor(name, blocks[name], raw_dtype=type)
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        # Of any bytes, but for the scales, that might not be finite.
        type = gguf.GGMLQuantizationType[name]
        _, size = gguf.GGML_QUANT_SIZES[type]
        x = np.random.default_rng(0).integers(0, 256, (8, 2, size), np.uint8)
        x[..., [0, 1, 2, 3] if name in ("Q4_K", "Q5_K") else [-4, -3, -2, -1]] = 0x31
        blocks[name] = x.reshape(8, 2 * size)
        writer.add_tensor(name, blocks[name], raw_dtype=type)
    sample = np.load(samples)
    for name in (name for name in sample if name.startswith("IQ") and "." not in name):
        type = gguf.GGMLQuantizationType[name]
        blocks[name] = sample[name]
        writer.add_tensor(name, blocks[name], raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    again = tmp_path / "b.gguf"
    interop.write_gguf(again, interop.open(path))
    for tensor in gguf.GGUFReader(again).tensors:
        np.testing.assert_array_equal(tensor.data, blocks[tensor.name])
    with interop.read_gguf(path) as checkpoint:
        assert checkpoint.metadata["u8"] == 200 and checkpoint.metadata["f64"] == 0.1
        assert checkpoint.metadata["tokens"] == ["a", "é"]
        assert checkpoint.metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
        for name, x in blocks.items():
            expected = gguf.quants.dequantize(x, gguf.GGMLQuantizationType[name])
            assert checkpoint[name].format == eqq.formats.as_format(name)
            np.testing.assert_array_equal(dense(checkpoint[name]), expected)


def test_gguf_of_nvfp4(tmp_path):
    import gguf

    path, kind = tmp_path / "a.gguf", gguf.GGMLQuantizationType.NVFP4
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(2)
    rng, blocks = np.random.default_rng(0), {}
    shapes = {"a.weight": (8,), "b.weight": (2, 8), "blk.0.attn_q.weight": (8,)}
    for name, shape in shapes.items():
        # Scales have no sign.
        x = rng.integers(0, 256, (*shape, 2, 36), np.uint8)
        x[..., :4] &= 127
        blocks[name] = x.reshape(*shape, 72)
    blocks["a.weight"][0, :4] = [0, 0x7F, 0x7E, 1]
    for name, x in blocks.items():
        writer.add_tensor(name, x, raw_dtype=kind)
    scale = np.array([0.25, 3], np.float32)
    writer.add_tensor("b.scale", scale)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = interop.open(path)
    expected = {name: gguf.quants.dequantize(x, kind) for name, x in blocks.items()}
    expected["b.weight"] *= scale[:, None, None]
    q_proj = expected["blk.0.attn_q.weight"].reshape(2, 2, 2, 128).swapaxes(1, 2)
    expected["blk.0.attn_q.weight"] = q_proj.reshape(8, 128)
    assert checkpoint.entries.keys() == expected.keys()
    for name, x in expected.items():
        assert checkpoint[name].format == eqq.NVFP4()
        np.testing.assert_array_equal(dense(checkpoint[name]), x)


def test_gguf_without_a_format(tmp_path):
    import gguf

    # (A type of intermediate results, which no model is stored in.)
    path, kind = tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q8_K
    writer = gguf.GGUFWriter(path, "test")
    writer.add_tensor("a.weight", np.zeros((4, 292), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = interop.open(path)
    for read in (lambda: checkpoint["a.weight"], checkpoint.entries["a.weight"].numpy):
        with pytest.raises(ValueError, match="of Q8_K, for which .* no format"):
            read()


def test_gguf_by_another_name(tmp_path):
    path = tmp_path / "a.gguf"
    tensors = {
        "a": quantized(eqq.Int8(32, _half), 4, 64),
        "b": quantized(eqq.Int4(32, scale_dtype=_half), 4, 64),
    }
    interop.write_gguf(path, tensors)
    checkpoint = interop.open(path)
    assert [e.format for e in checkpoint.entries.values()] == [
        eqq.formats.Q8_0(),
        eqq.formats.Q4_0(),
    ]
    for name, x in tensors.items():
        np.testing.assert_array_equal(dense(checkpoint[name]), dense(x))


@pytest.mark.parametrize(
    "metadata", [{"a": None}, {"a": {}}, {"a": [[1]]}, {"a": ["b", 1]}, {"a": 1j}]
)
def test_gguf_metadata_that_cannot_be_written(metadata, tmp_path):
    with pytest.raises(ValueError, match="`metadata` should have .* for 'a'"):
        interop.write_gguf(tmp_path / "a.gguf", {}, metadata)
    assert not list(tmp_path.iterdir())


def test_gguf_in_several_files(tmp_path):
    for i, name in ((1, "a"), (2, "b")):
        path = tmp_path / f"model-0000{i}-of-00002.gguf"
        interop.write_gguf(path, {name: normal(i)}, {"split.no": i - 1})
    for opened in (path, tmp_path):
        checkpoint = interop.open(opened)
        assert list(checkpoint) == ["a", "b"] and checkpoint["b"].shape == (2,)
        assert checkpoint.metadata == {}
