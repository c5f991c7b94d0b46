import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eqquant as eqq
from eqquant import interop

from ..helpers import normal
from . import files


def dense(x):
    x = x.astype(jnp.float32)
    return np.asarray(x.dequantize() if eqq.is_quantized(x) else x)


def check(path, made, read, format, exact=True):
    tensors, config, expected = made
    files.save(path, tensors, config)
    for checkpoint in (interop.open(path), read(path)):
        assert list(checkpoint) == list(expected)
        for name, w in expected.items():
            entry, q = checkpoint.entries[name], checkpoint[name]
            assert (entry.shape, entry.dtype) == (q.shape, q.dtype)
            assert q.format == entry.format and isinstance(q.format, format)
            struct = entry.struct()
            assert (struct.shape, struct.dtype) == (q.shape, q.dtype)
            assert (struct.axis, struct.format) == (q.axis, q.format)
            if exact:
                np.testing.assert_array_equal(dense(q), w)
            else:
                np.testing.assert_allclose(dense(q), w, rtol=2e-7, atol=1e-7)
    return q


_samples = pathlib.Path(__file__).parent / "samples"


@pytest.mark.optimized
@pytest.mark.parametrize(
    "sample", sorted(_samples.glob("*.safetensors")), ids=lambda path: path.stem
)
def test_samples(sample):
    checkpoint = interop.open(sample)
    (name,) = [n for n, e in checkpoint.entries.items() if e.format is not None]
    q = checkpoint[name]
    with np.load(sample.with_suffix(".npz")) as arrays:
        exact = arrays["dequant_f32"] if "dequant_f32" in arrays else arrays["dequant"]
    w = dense(q)
    if q.dtype == jnp.bfloat16:
        # As the package gives it.
        w = dense(q.dequantize())
    np.testing.assert_array_equal(w, exact)
    # And it multiplies, packed.
    x = normal(q.shape[-1], 3)
    np.testing.assert_allclose(q @ x, dense(q) @ x, rtol=1e-3, atol=1e-3)


@pytest.mark.examples(5)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(version=1),
        dict(version=2, ordered=True, k=160, dtype=jnp.bfloat16),
        dict(version=2, size=-1, with_index=False),
        dict(version=1, symmetric=True, k=160, size=128, ordered=True),
    ],
)
def test_gptq(bits, kwargs, path):
    made = files.gptq(bits=bits, **{"n": 32, **kwargs})
    q = check(path, made, interop.read_gptq, (eqq.Int, eqq.Int4))
    assert q.axis == -1 and q.bits_per_weight < bits + 4


# Version 1 stores zero-points minus one, of which AutoGPTQ's kernels take the last
# bits.
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_gptq_that_wrap(bits, path):
    (name,) = files.gptq()[2]
    tensors, config, _ = files.gptq(bits=bits, n=32, k=32)
    qzeros = name.replace("weight", "qzeros")
    tensors[qzeros] = np.full_like(tensors[qzeros], -1)
    files.save(path, tensors, config)
    q = interop.read_gptq(path)[name]
    assert not np.any(q.layout.to_rows(q.stored)["zero_point"])
    words = tensors[name.replace("weight", "qweight")].view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)[:, None]
    codes = (words[:, None] >> shifts & np.uint32(2**bits - 1)).reshape(32, 32)
    scales = tensors[name.replace("weight", "scales")].astype(np.float32)
    np.testing.assert_array_equal(dense(q), (codes * scales).T)


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_gptq_that_misstates_its_version(bits, path):
    (name,) = files.gptq()[2]
    tensors, config, expected = files.gptq(
        bits=bits, n=32, version=2, symmetric=True, size=-1
    )
    config["quantization_config"]["checkpoint_format"] = "gptq"
    files.save(path, tensors, config)
    np.testing.assert_array_equal(dense(interop.open(path)[name]), expected[name])
    # Unless it is told, or not symmetric.
    scales = tensors[name.replace("weight", "scales")].astype(np.float32)
    told = dense(interop.read_gptq(path, version=1)[name])
    np.testing.assert_array_equal(told, (expected[name].T - scales).T)
    config["quantization_config"]["sym"] = False
    files.save(path, tensors, config)
    np.testing.assert_array_equal(dense(interop.open(path)[name]), told)


def test_gptq_without_configuration(path):
    tensors, _, expected = files.gptq(version=2, bits=3, n=32)
    files.save(path, tensors)
    ((name, w),) = expected.items()
    q = interop.read_gptq(path, version=2)[name]
    np.testing.assert_array_equal(dense(q), w)
    # Of version 1, by default: the zero-points are one more, and the largest is 0.
    other = dense(interop.open(path)[name])
    zeros = q.layout.to_rows(q.stored)["zero_point"]
    steps = np.where(zeros == 7, -7, 1) * np.asarray(q.scale)
    np.testing.assert_allclose(w - other, steps.repeat(32, 1), rtol=1e-5)
    bare = {k: x for k, x in tensors.items() if not k.endswith(("qzeros", "g_idx"))}
    files.save(path, bare)
    with pytest.raises(
        ValueError, match="q_proj.weight' .*bits.*8], and the hint.*None"
    ):
        interop.open(path)
    zero = interop.read_gptq(path, bits=3)[name]
    assert zero.shape == w.shape


@pytest.mark.parametrize(
    "kwargs",
    [dict(), dict(size=-1), dict(n=8, k=160, dtype=jnp.bfloat16), dict(k=33, size=-1)],
)
def test_awq(kwargs, path):
    check(path, files.awq(**kwargs), interop.read_awq, eqq.Int4)


@pytest.mark.examples(6)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(),
        dict(shape=(8, 128), size=32, nested=256, dtype="float16"),
        # Blocks of a row and a half; of several rows; and none that end with a row.
        dict(shape=(6, 96), size=64, nested=128),
        dict(shape=(8, 32), size=256, dtype="bfloat16"),
        dict(shape=(7, 33), size=64),
        dict(shape=(2, 3, 50), size=64, nested=64),
        dict(shape=(2, 8, 64), size=64),
        dict(shape=(100,), size=64),
        dict(shape=(10, 36), size=4096),
    ],
)
def test_bitsandbytes(kind, kwargs, path):
    made = files.bitsandbytes(kind=kind, **kwargs)
    if made[2] and "dtype" in kwargs:
        dtype = jnp.dtype(kwargs["dtype"])
        ((name, w),) = made[2].items()
        files.save(path, made[0])
        assert interop.open(path)[name].dtype == dtype
    formats = (eqq.NF4, eqq.formats.BnbFP4) if "nested" not in kwargs else eqq.Nested
    check(path, made, interop.read_bitsandbytes, formats)


def test_bitsandbytes_of_scales_that_are_quantized(path):
    # Whose blocks are of a row and a half, and are not all whole.
    made = files.bitsandbytes((33, 11008), nested=256)
    q = check(path, made, interop.read_bitsandbytes, eqq.Nested)
    assert q.axis == -1 and q.bits_per_weight < 4.16
    again = path.with_name("again.safetensors")
    interop.write_bitsandbytes(again, interop.open(path))
    found = safetensors.numpy.load_file(again)
    assert found.keys() == made[0].keys()
    for name, x in made[0].items():
        if "quant_state" not in name:
            np.testing.assert_array_equal(found[name], x)
            continue
        said = [json.loads(text.tobytes()) for text in (found[name], x)]
        assert said[0] == said[1]
    with pytest.raises(ValueError, match="has some of the rows"):
        rows = jax.tree.map(lambda a: a if a.shape[-1] == 1 else a[..., 1:3], q)
        interop.write_bitsandbytes(again, {"a": rows})


def test_bitsandbytes_8_bit(path):
    made = files.bitsandbytes8()
    check(path, made, interop.read_bitsandbytes, eqq.Int8)


@pytest.mark.examples(6)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(),
        dict(symmetric=False, k=100, n=41),
        dict(symmetric=False, size=None, dtype=jnp.bfloat16),
        dict(ordered=True, size=48),
    ],
)
def test_compressed_tensors(bits, kwargs, path):
    made = files.compressed(bits=bits, **kwargs)
    check(path, made, interop.read_compressed_tensors, (eqq.Int, eqq.Int4))


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("shape", [(1,), (40, 1), (40, 3), (), (40,)])
def test_compressed_tensors_of_8_bits(kind, shape, path):
    if shape == (40,):
        tensors, config, expected = files.compressed8((40, 1), kind=kind)
        tensors["q.weight_scale"] = tensors["q.weight_scale"][:, 0]
        made = tensors, config, expected
    else:
        made = files.compressed8(shape, kind=kind, dtype=jnp.bfloat16)
    check(path, made, interop.read_compressed_tensors, (eqq.Int8, eqq.FP8))


@pytest.mark.parametrize("shape", [(1,), (40, 3), (3, 2)])
def test_zero_points_of_8_bits(shape, path):
    (tensors, config, _), n, k = files.compressed8(shape), 40, 96
    low = np.random.default_rng(1).integers(-128, 128, shape, np.int8)
    tensors["q.weight_zero_point"] = low
    rows, groups = shape if len(shape) == 2 else (1, 1)

    def spread(x):
        x = np.repeat(x.reshape(rows, groups), -(-n // rows), 0)[:n]
        return np.repeat(x, -(-k // groups), 1)[:, :k].astype(np.float32)

    codes, scale = tensors["q.weight"].astype(np.float32), tensors["q.weight_scale"]
    expected = {"q.weight": (codes - spread(low)) * spread(scale)}
    made = tensors, config, expected
    check(path, made, interop.read_compressed_tensors, eqq.Int)


def test_one_zero_point_of_all(path):
    tensors, config, _ = files.compressed(bits=3, size=None, name="q")
    scale = tensors["q.weight_scale"][:1, 0]
    low = np.array([-3], np.int8)
    tensors |= {"q.weight_scale": scale, "q.weight_zero_point": low}
    files.save(path, tensors, config)
    w = dense(interop.open(path)["q.weight"])
    del tensors["q.weight_zero_point"]
    files.save(path, tensors, config)
    symmetric = dense(interop.open(path)["q.weight"])
    np.testing.assert_array_equal(w, symmetric + 3 * scale)


def test_groups_that_are_no_blocks(path):
    tensors, config, _ = files.compressed(size=24, name="q")
    files.save(path, tensors, config)
    with pytest.raises(ValueError, match="'q.weight' has groups of 24"):
        interop.open(path)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_blocks_of_rows_and_columns(suffix, path):
    tensors, config, expected = files.compressed8((3, 2), kind="float", n=48)
    tensors[f"q.{suffix}"] = tensors.pop("q.weight_scale")
    made = tensors, config, expected
    check(path, made, interop.read_compressed_tensors, eqq.FP8)


@pytest.mark.parametrize("shape", [(40, 1), (40, 3), (1, 1), (5, 3)])
def test_stacks_of_8_bits(shape, path):
    made = [files.compressed8(shape, kind="float", seed=i) for i in range(2)]
    (first, config, one), (second, _, other) = made
    tensors = {name: np.stack([x, second[name]]) for name, x in first.items()}
    expected = {name: np.stack([w, other[name]]) for name, w in one.items()}
    made = tensors, config, expected
    q = check(path, made, interop.read_compressed_tensors, eqq.FP8)
    np.testing.assert_array_equal(dense(q[1]), expected["q.weight"][1])


def test_nvfp4(path):
    made = files.nvfp4()
    check(path, made, interop.read_compressed_tensors, eqq.NVFP4, exact=False)


def test_mxfp4(path):
    q = check(path, files.mxfp4(), interop.read_mxfp4, eqq.MXFP4)
    assert q.axis == -2 and q.shape == (3, 64, 24)
    x = normal(3, 2, 64)
    np.testing.assert_allclose(x @ q, x @ dense(q), rtol=1e-3, atol=1)


@pytest.mark.parametrize("divides", [True, False])
def test_bitnet(divides, path):
    q = check(path, files.bitnet(divides=divides), interop.read_bitnet, eqq.Ternary)
    assert q.format.scale == "tensor"


def test_stacks_of_compressed_tensors(path):
    made = [files.compressed(40, 100, bits=3, symmetric=False, seed=i) for i in (0, 1)]
    (first, config, dense), (second, _, other) = made
    tensors = {name: np.stack([x, second[name]]) for name, x in first.items()}
    (shape,) = (name for name in tensors if name.endswith("_shape"))
    tensors[shape] = np.array([2, 40, 100])
    expected = {name: np.stack([w, other[name]]) for name, w in dense.items()}
    made = tensors, config, expected
    q = check(path, made, interop.read_compressed_tensors, eqq.Int)
    assert q.shape == (2, 40, 100) and q[1].shape == (40, 100)


def test_what_is_beside(path):
    tensors, config, expected = files.gptq()
    dense = {
        "model.layers.0.self_attn.q_proj.bias": normal(64),
        "model.norm.weight": normal(8, dtype=jnp.bfloat16),
        "lm_head.weight": normal(4, 6, dtype=jnp.float16),
        "step": jnp.arange(3, dtype=jnp.int32),
    }
    arrays = {name: np.asarray(x) for name, x in dense.items()}
    files.save(path, tensors | arrays, config, {"by": "somebody"})
    checkpoint = interop.open(path)
    assert checkpoint.kind == "gptq" and checkpoint.metadata == {"by": "somebody"}
    assert checkpoint.config == config
    assert set(checkpoint) == {*dense, *expected}
    for name, x in dense.items():
        found = checkpoint[name]
        assert isinstance(found, jax.Array) and found.dtype == x.dtype
        assert np.all(found == x)
        np.testing.assert_array_equal(checkpoint.entries[name].numpy(), arrays[name])
    below = checkpoint["model.layers.0.self_attn"]
    assert set(below) == {"q_proj.weight", "q_proj.bias"}
    assert eqq.is_quantized(below["q_proj"]["weight"])
    with pytest.raises(KeyError):
        checkpoint["model.layers.1"]
    with pytest.raises(ValueError, match="q_proj.weight' is quantized"):
        checkpoint.entries["model.layers.0.self_attn.q_proj.weight"].numpy()
    with pytest.raises(ValueError, match="no array in it has the layout 'awq'"):
        interop.read_awq(path)


def test_several_layouts_in_one(path):
    made = [files.gptq(), files.bitsandbytes(), files.awq(), files.nvfp4()]
    files.save(path, {k: x for tensors, _, _ in made for k, x in tensors.items()})
    checkpoint = interop.open(path)
    assert checkpoint.kind == "gptq+bitsandbytes+awq+compressed-tensors"
    for _, _, expected in made:
        for name, w in expected.items():
            np.testing.assert_allclose(dense(checkpoint[name]), w, rtol=1e-6, atol=1e-6)


def test_64_bits(path):
    # Integers that fit into 32 bits have these, as in what `convert` writes.
    arrays = {
        "a": np.array([-(2**31), 2**31 - 1]),
        "b": np.array([2**31]),
        "c": np.array([2**32 - 1], np.uint64),
        "d": np.array([1.0]),
    }
    safetensors.numpy.save_file(arrays, path)
    checkpoint = interop.open(path)
    for name, dtype in (("a", jnp.int32), ("c", jnp.uint32)):
        assert checkpoint[name].dtype == dtype
        np.testing.assert_array_equal(checkpoint[name], arrays[name])
    for name, kind in (("b", "int64"), ("d", "float64")):
        with pytest.raises(ValueError, match=rf"'{name}'.*{kind}.*enable_x64\(True\)"):
            checkpoint[name]
    with jax.enable_x64(True):
        for name, x in arrays.items():
            np.testing.assert_array_equal(checkpoint[name], x, strict=True)
    # The same in a model, from a file and from arrays of NumPy.
    for tree in (checkpoint, arrays):
        model = {"x": jnp.zeros(2, jnp.int32)}
        found = interop.load_into(model, tree, {"a": "x", "*": None})["x"]
        np.testing.assert_array_equal(found, arrays["a"])
        with pytest.raises(ValueError, match="int64.*enable_x64"):
            model = {"x": jnp.zeros(1, jnp.int32)}
            interop.load_into(model, tree, {"b": "x", "*": None})


def test_file_that_changes(path):
    files.save(path, {"a": np.ones(1000, np.float32)})
    checkpoint = interop.open(path)
    a = checkpoint["a"]
    with open(path, "r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match="cut short since"):
        checkpoint["a"]
    assert a.sum() == 1000
    checkpoint.close()
    with pytest.raises(ValueError, match="is closed"):
        checkpoint["a"]
