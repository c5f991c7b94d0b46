"""What llama.cpp does to the arrays of an architecture, and that it is undone: against
files of the package gguf, and loops over rows."""

import gguf
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant.interop._layouts._architectures import architectures

from .llama_files import tensors_of


_heads, _few, _half = 4, 2, 3


def _interleaved(x, heads):
    # Of each head, row i of the first half, and then row i of the second.
    rows = x.reshape(heads, 2 * _half, *x.shape[1:])
    order = [half * _half + i for i in range(_half) for half in range(2)]
    return np.concatenate([head[order] for head in rows])


def _originals():
    rng = np.random.default_rng(0)
    number = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    found = {"output_norm.weight": number(8), "blk.0.attn_norm.weight": number(8)}
    found["blk.0.ssm_norm.weight"] = number(8)
    for x, heads in (("q", _heads), ("k", _few), ("v", _few)):
        found[f"blk.0.attn_{x}.weight"] = number(heads * 2 * _half, 8)
        found[f"blk.0.attn_{x}.bias"] = number(heads * 2 * _half)
    return found


def _as_in_files(architecture, arrays, kinds, one):
    """As the converter of llama.cpp writes them, given the kinds of arrays of queries
    and keys that it permutes, and what it adds to norms."""
    found = dict(arrays)
    for x, heads in (("q", _heads), ("k", _few)):
        for kind in kinds:
            name = f"blk.0.attn_{x}.{kind}"
            found[name] = _interleaved(found[name], heads)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight"):
        found[name] = found[name] + np.float32(one)
    return found


def _metadata(architecture):
    return {
        "general.architecture": architecture,
        f"{architecture}.attention.head_count": _heads,
        f"{architecture}.attention.head_count_kv": _few,
    }


def _write(path, architecture, arrays):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(_heads)
    writer.add_head_count_kv(_few)
    for name, x in arrays.items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Read in llama.cpp's converter, by hand.
_both = ("weight", "bias")
_known = {
    **{
        name: (_both, 0)
        for name in (
            *("llama", "mistral3", "granite", "granitemoe", "granitehybrid"),
            *("smollm3", "arcee", "llama-embed", "deci", "deepseek", "llada"),
        )
    },
    **dict.fromkeys(("minicpm", "olmo", "internlm2", "arctic"), (("weight",), 0)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma-embedding"), ((), 1)),
    **dict.fromkeys(("nemotron", "qwen3next"), ((), 1)),
    **dict.fromkeys(("gemma3n", "gemma4", "qwen2", "qwen3", "llama4"), ((), 0)),
    **dict.fromkeys(("apertus", "afmoe", "cohere2", "other"), ((), 0)),
}


@pytest.mark.parametrize("architecture", _known)
def test_arrays_of_an_architecture(architecture, tmp_path):
    path, arrays = tmp_path / "a.gguf", _originals()
    expected = _as_in_files(architecture, arrays, *_known[architecture])
    _write(path, architecture, expected)
    with interop.open(path) as checkpoint:
        found = dict(checkpoint)
    for name, x in arrays.items():
        # (One that was added takes away from what is small.)
        atol = 1.2e-7 * _known[architecture][1]
        np.testing.assert_allclose(found[name], x, rtol=0, atol=atol)
    # And the other way.
    again = tmp_path / "b.gguf"
    interop.write_gguf(again, arrays, _metadata(architecture))
    written = tensors_of(again)
    for name, x in expected.items():
        np.testing.assert_array_equal(written[name][1], x)
    # Nothing is added twice.
    interop.write_gguf(again, interop.open(path), _metadata(architecture))
    for name, (_, x) in tensors_of(again).items():
        np.testing.assert_allclose(x, expected[name], rtol=0, atol=atol)


def test_norms_of_16_bits_are_written_in_32(tmp_path):
    norm = {"output_norm.weight": np.full(3, 1e-3, np.float16)}
    interop.write_gguf(tmp_path / "a.gguf", norm, _metadata("gemma3"))
    kind, x = tensors_of(tmp_path / "a.gguf")["output_norm.weight"]
    assert kind == "F32"
    np.testing.assert_array_equal(x, norm["output_norm.weight"] + np.float32(1))


def test_adapters(tmp_path):
    # Their rows are permuted, and their files do not have the number of heads.
    path, w = tmp_path / "a.gguf", np.zeros((24, 4), np.float32)
    metadata = {"general.architecture": "llama", "general.type": "adapter"}
    name = "blk.0.attn_q.weight.lora_b"
    interop.write_gguf(path, {name: w}, metadata)
    with interop.open(path) as checkpoint:
        with pytest.raises(ValueError, match="It is an adapter, whose rows"):
            interop.load_into({"w": w}, checkpoint, ["llama", {"*": "w"}])
        np.testing.assert_array_equal(
            interop.load_into({"w": w}, checkpoint, {name: "w"})["w"], w
        )


def test_norms_that_are_quantized(tmp_path):
    norm = {"output_norm.weight": eqq.quantize(np.ones(64, "f4"), "q8_0")}
    path = tmp_path / "a.gguf"
    with pytest.raises(ValueError, match="'output_norm.weight'.*adds one to the n"):
        interop.write_gguf(path, norm, _metadata("gemma3"))
    # In a file of another library.
    interop.write_gguf(path, norm, _metadata("llama3"))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"llama3", b"gemma3"))
    with interop.open(path) as checkpoint:
        with pytest.raises(ValueError, match="'output_norm.weight': it is of Q8_0"):
            checkpoint["output_norm.weight"]


@pytest.mark.parametrize(
    "name, near", (("lama", "llama"), ("qwen35moee", "qwen35moe"), ("chameleon", None))
)
def test_the_remedy_comes_first(tmp_path, name, near):
    w = np.ones((8, 32), np.float32)
    path, arrays = tmp_path / "a.gguf", {"blk.0.attn_q.weight": w}
    interop.write_gguf(path, arrays, _metadata(name))
    with interop.open(path) as checkpoint, pytest.raises(ValueError) as e:
        interop.load_into({"q": w}, checkpoint, ["llama", {"*": "q"}])
    before, after = str(e.value).split("Load it with patterns of `rename`.")
    assert repr(name) in before
    assert len(str(e.value)) < 300
    assert near is None and after == "" or after.startswith(" (Names that are sim")
    assert near is None or near in after


def test_metadata_of_another_file(tmp_path):
    # With names of Hugging Face, and the metadata of a file alone.
    path, again = tmp_path / "a.gguf", tmp_path / "b.gguf"
    _write(path, "granite", {})
    w = _originals()["blk.0.attn_k.weight"]
    arrays = {"model.layers.0.self_attn.k_proj.weight": w}
    interop.write_gguf(again, arrays, rename="llama", config=path)
    _, found = tensors_of(again)["blk.0.attn_k.weight"]
    np.testing.assert_array_equal(found, _interleaved(w, _few))
    with interop.open(again) as checkpoint:
        model = {"w": np.zeros_like(w)}
        rename = ["llama", {"model.layers.0.self_attn.k_proj.weight": "w"}]
        np.testing.assert_array_equal(
            interop.load_into(model, checkpoint, rename)["w"], w
        )


def test_architectures_that_are_known_are_those_of_llama_cpp():
    named = {*gguf.MODEL_ARCH_NAMES.values()}
    # Younger than the package gguf.
    younger = {"cohere2moe", "eagle3", "granite_swa", "laguna", "mellum", "minimax-m3"}
    assert {*architectures} - named <= younger | {"nanbeige"}


def test_architectures_that_are_not_known(tmp_path):
    path, arrays = tmp_path / "a.gguf", _originals()
    _write(path, "chameleon", arrays)
    w = {"q": np.zeros((_heads * 2 * _half, 8), np.float32)}
    by_hand = {"blk.0.attn_q.weight": "q", "*": None}
    with interop.open(path) as checkpoint:
        # As in the file.
        q = interop.load_into(w, checkpoint, by_hand)["q"]
        np.testing.assert_array_equal(q, arrays["blk.0.attn_q.weight"])
        for rename in ("llama", [by_hand, "mistral"]):
            with pytest.raises(ValueError, match="'chameleon' should be an arch.*patt"):
                interop.load_into(w, checkpoint, rename)
        with pytest.raises(ValueError, match="'chameleon' should be an arch.*patt"):
            interop.write(tmp_path / "out", checkpoint, "mlx", rename="llama")
    again = tmp_path / "b.gguf"
    with pytest.raises(ValueError, match="'chameleon' should be .* as `metadata`"):
        interop.write_gguf(again, arrays, config=path)
    with pytest.raises(ValueError, match="'chameleon' should be .* patterns"):
        interop.write_gguf(again, arrays, _metadata("chameleon"), rename="llama")
    assert not again.exists()
    interop.write_gguf(again, arrays, _metadata("chameleon"))


def test_every_architecture_that_is_known(tmp_path):
    path, again, arrays = tmp_path / "a.gguf", tmp_path / "b.gguf", _originals()
    for architecture in architectures:
        metadata = _metadata(architecture)
        interop.write_gguf(path, arrays, metadata)
        with interop.open(path) as checkpoint:
            for name, x in arrays.items():
                is_norm = name.endswith("norm.weight")
                atol = 1.2e-7 if is_norm else 0
                np.testing.assert_allclose(checkpoint[name], x, rtol=0, atol=atol)
            interop.write_gguf(again, checkpoint, metadata)
        first, second = tensors_of(path), tensors_of(again)
        for name, (_, x) in first.items():
            np.testing.assert_allclose(second[name][1], x, rtol=0, atol=1.2e-7)
