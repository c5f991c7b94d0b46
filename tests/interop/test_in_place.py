"""GGUF files whose arrays the native library writes to their places: the same bits as
without it."""

import gguf
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
import eqquant.kernels.native._library as library
from eqquant.interop import Join, load_into, open, Split, Transposed
from eqquant.interop._layouts._gguf import block_formats


pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason="there is no native library here"
)
_kinds = [x for x in block_formats if x in gguf.GGMLQuantizationType.__members__]


def _write(path, tensors, architecture="qwen2", most=120):
    """Random blocks, of bytes below `most`, with which scales are finite: of each name,
    the type, and the shape in blocks."""
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    writer.add_head_count(2)
    for name, (kind, shape) in tensors.items():
        type = gguf.GGMLQuantizationType[kind]
        _, nbytes = gguf.GGML_QUANT_SIZES[type]
        shape = (*shape[:-1], shape[-1] * nbytes)
        x = rng.integers(0, most, shape, np.uint8)
        writer.add_tensor(name, x, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _both(monkeypatch, fn):
    """What a function returns with the library, which is equal to that without it."""
    monkeypatch.setenv("EQQUANT_NATIVE", "0")
    expected = fn()
    monkeypatch.setenv("EQQUANT_NATIVE", "require")
    found = fn()
    assert jtu.tree_structure(found) == jtu.tree_structure(expected)
    for a, b in zip(jtu.tree_leaves(found), jtu.tree_leaves(expected), strict=True):
        assert isinstance(a, jax.Array) and a.sharding == b.sharding
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    return found


def _struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_all_types(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    _write(path, {kind: (kind, (2, 67, 3)) for kind in _kinds}, most=256)
    with open(path) as checkpoint:
        found = _both(monkeypatch, lambda: dict(checkpoint))
        assert [x for x, e in checkpoint.entries.items() if not e.write] == ["TQ1_0"]
    # The arrays are no view of the file, and not those of each other.
    path.write_bytes(bytes(path.stat().st_size))
    for kind, q in found.items():
        assert q.shape == (2, 67, 3 * block_formats[kind].block_size)
        assert all(np.any(a) for a in jtu.tree_leaves(q.stored))


@pytest.mark.usefixtures("systems")
def test_permuted_rows(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    tensors = {f"blk.0.attn_{x}.weight": ("Q8_0", (36, 2)) for x in "qkv"}
    _write(path, tensors, "llama")
    found = _both(monkeypatch, lambda: dict(open(path)))
    by_gguf = {x.name: x for x in gguf.GGUFReader(path).tensors}
    for name, q in found.items():
        x = by_gguf[name]
        w = gguf.quants.dequantize(x.data, x.tensor_type)
        if name != "blk.0.attn_v.weight":
            w = w.reshape(2, 9, 2, 64).swapaxes(1, 2).reshape(36, 64)
        np.testing.assert_array_equal(q.dequantize(), w)


@pytest.mark.examples(1)
@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0"])
def test_joined_and_stacked(kind, tmp_path, monkeypatch):
    path, block = tmp_path / "model.gguf", block_formats[kind].block_size
    sizes = {"q": 64, "k": 33, "v": 31}
    tensors = {
        f"blk.{i}.attn_{x}.weight": (kind, (n, 2))
        for i in range(2)
        for x, n in sizes.items()
    }
    _write(path, tensors | {"experts": (kind, (3, 34, 2))})
    k = 2 * block
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    sharded = NamedSharding(mesh, P(None, "a", None))
    model = {
        "qkv": jax.ShapeDtypeStruct((2, 128, k), jnp.float32, sharding=sharded),
        "again": _struct(2, 31, k),
        "up": _struct(3, k, 17),
        "gate": _struct(3, k, 17),
    }
    joined = Join(*(f"blk.{{i}}.attn_{x}.weight" for x in "qkv"))
    # Those of `again` are read once, and are parts of `qkv`, too.
    rules = [
        {"blk.{i}.attn_v.weight": ("blk.{i}.attn_v.weight", "v.{i}")},
        {"experts": Split("up.T", "gate.T", sizes=(17, 17))},
        {joined: "qkv", "v.{i}": "again", "{x}.T": Transposed("{x}")},
    ]

    def load():
        with open(path) as checkpoint:
            return load_into(model, checkpoint, rules)

    found = _both(monkeypatch, load)
    assert found["qkv"].is_sharded and found["up"].axis == -2
    del model["again"]
    del rules[0], rules[1]["v.{i}"]
    alone = _both(monkeypatch, load)
    w = {x.name: gguf.quants.dequantize(x.data, x.tensor_type) for x in _tensors(path)}
    wanted = np.stack(
        [
            np.concatenate([w[f"blk.{i}.attn_{x}.weight"] for x in "qkv"])
            for i in range(2)
        ]
    )
    np.testing.assert_array_equal(alone["qkv"].dequantize(), wanted)
    np.testing.assert_array_equal(found["qkv"].dequantize(), wanted)
    np.testing.assert_array_equal(found["again"].dequantize(), wanted[:, 97:])
    np.testing.assert_array_equal(
        jnp.concatenate([found["up"].dequantize(), found["gate"].dequantize()], -1),
        w["experts"].swapaxes(-1, -2),
    )


def _tensors(path):
    return gguf.GGUFReader(path).tensors


def test_no_second_copy(tmp_path, monkeypatch):
    # What is joined is not read apart before.
    path = tmp_path / "model.gguf"
    _write(path, {x: ("Q4_K", (64, 1)) for x in "ab"})
    monkeypatch.setenv("EQQUANT_NATIVE", "require")
    monkeypatch.setattr("eqquant.interop.Entry.read", None)
    with open(path) as checkpoint:
        q = load_into({"w": _struct(128, 256)}, checkpoint, {Join("a", "b"): "w"})["w"]
    assert isinstance(q, eqq.QuantizedArray) and q.shape == (128, 256)


def test_cut_short(tmp_path):
    path = tmp_path / "model.gguf"
    _write(path, {x: ("Q4_K", (640, 4)) for x in "ab"})
    with open(path) as checkpoint:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1000)
        with pytest.raises(ValueError, match="(?s)'b'.*cut short"):
            load_into({"w": _struct(1280, 1024)}, checkpoint, {Join("a", "b"): "w"})
