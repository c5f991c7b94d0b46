"""The model of the demo against one in NumPy, in float64, which has the conventions of
llama.cpp, and reads files by its package."""

import equinox as eqx
import gguf
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant import demo, interop

from ..interop import folders
from ..interop.llama_files import llama3
from . import tiny


def _rotated(x, positions, base, factors, neighbours):
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** -(np.arange(half) / half) / factors
    rotation = np.exp(1j * angles)[:, None]
    if neighbours:
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * rotation
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    z = (x[..., :half] + 1j * x[..., half:]) * rotation
    return np.concatenate([z.real, z.imag], -1)


def _normed(x, weight):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * weight


def by_numpy(path, tokens):
    """The logits of a file of llama.cpp."""
    reader = gguf.GGUFReader(path)
    w = {
        t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64)
        for t in reader.tensors
    }
    name = reader.fields["general.architecture"].contents()
    get = lambda key: reader.fields[f"{name}.{key}"].contents()
    heads, few = get("attention.head_count"), get("attention.head_count_kv")
    base, positions = get("rope.freq_base"), np.arange(len(tokens))
    factors = w.get("rope_freqs.weight", 1.0)
    x = w["token_embd.weight"][tokens]
    for i in range(get("block_count")):
        b = {k.removeprefix(f"blk.{i}."): a for k, a in w.items()}
        y = _normed(x, b["attn_norm.weight"])
        q, k, v = [
            (y @ b[f"attn_{c}.weight"].T + b.get(f"attn_{c}.bias", 0)).reshape(
                len(x), n, -1
            )
            for c, n in (("q", heads), ("k", few), ("v", few))
        ]
        if name == "qwen3":
            q, k = (
                _normed(q, b["attn_q_norm.weight"]),
                _normed(k, b["attn_k_norm.weight"]),
            )
        q, k = [_rotated(a, positions, base, factors, name == "llama") for a in (q, k)]
        mixed = []
        for h in range(heads):
            at = h * few // heads
            scores = q[:, h] @ k[:, at].T / np.sqrt(q.shape[-1])
            scores = np.where(np.tri(len(x)) > 0, scores, -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(shares / shares.sum(-1, keepdims=True) @ v[:, at])
        x = x + np.concatenate(mixed, -1) @ b["attn_output.weight"].T
        y = _normed(x, b["ffn_norm.weight"])
        gate = y @ b["ffn_gate.weight"].T
        y = gate / (1 + np.exp(-gate)) * (y @ b["ffn_up.weight"].T)
        x = x + y @ b["ffn_down.weight"].T
    x = _normed(x, w["output_norm.weight"])
    return x @ w.get("output.weight", w["token_embd.weight"]).T


def _load(path):
    with interop.open(path) as checkpoint:
        return demo.load_llama(checkpoint)


def _close(found, wanted, bound):
    assert np.max(np.abs(found - wanted)) < bound * np.max(np.abs(wanted))


@pytest.mark.examples(3)
@pytest.mark.parametrize("kind", ("llama", "llama3", "qwen2", "qwen3"))
@pytest.mark.parametrize("format", (None, "q4_1"))
def test_logits(kind, format, tmp_path):
    path = tiny.write(tmp_path / "a.gguf", kind, format)
    model = _load(path)
    assert eqq.is_quantized(model.layers.mlp.up_proj.weight) == (format is not None)
    assert (model.lm_head is None) == (kind == "qwen3")
    tokens = np.random.default_rng(0).integers(0, len(tiny.tokens()), 20)
    wanted = by_numpy(path, tokens)
    found = eqx.filter_jit(model)(jnp.asarray(tokens, jnp.int32))
    _close(found, wanted, 1e-5)
    # From a cache.
    step = eqx.filter_jit(lambda *args: model.step(*args))
    past = model.empty_past(24)
    _, past = step(jnp.asarray(tokens[:12], jnp.int32), jnp.asarray(0), past)
    found, past = step(jnp.asarray(tokens[12:], jnp.int32), jnp.asarray(12), past)
    _close(found, wanted[12:], 1e-5)


@pytest.mark.examples(1)
@pytest.mark.parametrize("format", (None, "q4_1"))
def test_formats_that_differ_between_layers(format, tmp_path):
    path = tiny.write(tmp_path / "a.gguf", format=format, values="q5_0")
    model = _load(path)
    kinds = [getattr(x.self_attn.v_proj.weight, "format", None) for x in model.layers]
    assert kinds[0] == kinds[2] != kinds[1] == eqq.formats.Q5_0()
    tokens = np.random.default_rng(0).integers(0, len(tiny.tokens()), 20)
    wanted = by_numpy(path, tokens)
    with pytest.raises(ValueError, match="another format in some layers"):
        model.stacked()
    dense = eqq.tree_dequantize(model).stacked()
    assert dense.layers.self_attn.v_proj.weight.shape == (tiny.depth, 32, 64)
    for each in (model, dense):
        _close(eqx.filter_jit(each)(jnp.asarray(tokens)), wanted, 1e-5)
    step = eqx.filter_jit(lambda *args: model.step(*args))
    _, past = step(jnp.asarray(tokens[:12]), jnp.asarray(0), model.empty_past(20))
    found, _ = step(jnp.asarray(tokens[12:]), jnp.asarray(12), past)
    _close(found, wanted[12:], 1e-5)


@pytest.mark.examples(1)
@pytest.mark.parametrize("values", (None, "q5_0"))
def test_generate(values, tmp_path):
    path = tiny.write(tmp_path / "a.gguf", values=values)
    tokens = [5, 9, 7]
    for _ in range(6):
        tokens.append(int(np.argmax(by_numpy(path, np.array(tokens))[-1])))
    prompt = jnp.asarray(tokens[:3], jnp.int32)
    assert demo.generate(_load(path), prompt, 6).tolist() == tokens[3:]


@pytest.mark.parametrize("kind", ("Llama", "Mistral", "Qwen2", "Qwen3"))
def test_folder(kind, tmp_path):
    """A folder of Hugging Face is the same model as the file made from it."""
    scaling = {"rope_scaling": llama3 | {"original_max_position_embeddings": 32}}
    more = scaling if kind == "Llama" else {}
    folder = folders.write(tmp_path / "a", kind, **more)
    with interop.open(folder) as checkpoint:
        interop.write_gguf(tmp_path / "a.gguf", checkpoint, config=folder)
    found, wanted = _load(folder), _load(tmp_path / "a.gguf")
    frequencies = found.config.frequencies, wanted.config.frequencies
    np.testing.assert_allclose(*frequencies, rtol=1e-6)
    tokens = np.arange(15)
    wanted = by_numpy(tmp_path / "a.gguf", tokens)
    _close(eqx.filter_jit(found)(jnp.asarray(tokens)), wanted, 1e-5)


def test_quantized(tmp_path):
    """All weights of products are found, and nothing is dequantized."""
    model = _load(tiny.write(tmp_path / "a.gguf"))
    tokens = jnp.arange(10)
    dense = eqx.filter_jit(model)(tokens)
    for example in (None, tokens):
        q = eqq.tree_quantize(model, "int8", example=example, min_size=0)
        kept = {
            type(leaf) for leaf in jax.tree.leaves(q.layers, is_leaf=eqq.is_quantized)
        }
        assert eqq.QuantizedArray in kept
        x = q.layers.self_attn.k_proj.weight
        assert x.shape == (tiny.depth, 32, 64) and x.axis == -1
        _close(eqx.filter_jit(q)(tokens), dense, 0.02)


def test_random():
    config = demo.Config(50, 32, 48, 2, 4, 2, 8, factors=(2.0,), has_biases=True)
    model = demo.Llama(config, key=jr.key(0))
    assert eqx.filter_eval_shape(model, jnp.arange(5)).shape == (5, 50)
    np.testing.assert_allclose(config.frequencies, 0.5 * 1e4 ** -(np.arange(4) / 4))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"general.architecture": "gemma"}, "'llama'.*'qwen3'.*Got 'gemma'"),
        ({"llama.expert_count": 4}, "no experts. Got 4"),
        ({"llama.rope.scaling.type": "yarn"}, "linear.*Got 'yarn'"),
        ({"llama.block_count": 0}, "positive integer for 'depth'. Got 0"),
        ({"llama.attention.layer_norm_rms_epsilon": "a"}, "number for 'eps'. Got 'a'"),
    ],
)
def test_other_models(change, message, tmp_path):
    path = tmp_path / "a.gguf"
    interop.write_gguf(path, tiny.arrays("qwen2"), tiny.metadata("llama") | change)
    with pytest.raises(ValueError, match=message):
        demo.Config.of(interop.open(path))
