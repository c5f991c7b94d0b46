import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant import interop

from ..helpers import normal, trees_equal
from ..raises import raises
from . import files
from .llama import heads, Llama, to_gguf


@pytest.fixture(scope="module")
def model():
    return Llama(jr.key(0))


_rename = ["llama", {"model.*": "*"}]


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "format",
    [
        None,
        jnp.float16,
        jnp.bfloat16,
        eqq.formats.Q4_0(),
        eqq.formats.Q8_0(),
        eqq.formats.Q4_K(),
    ],
    ids=["f32", "f16", "bf16", "q4_0", "q8_0", "q4_k"],
)
def test_gguf(format, model, tmp_path):
    path = tmp_path / "model.gguf"
    names, metadata = to_gguf(model, format)
    interop.write_gguf(path, names, metadata)
    checkpoint = interop.read_gguf(path)
    assert checkpoint.metadata == metadata
    is_quantized = isinstance(format, eqq.AbstractFormat)
    name = "blk.0.attn_q.weight"
    entry, q = checkpoint.entries[name], checkpoint[name]
    if is_quantized:
        assert q.format == entry.format == format
    else:
        assert isinstance(q, jax.Array) and entry.format is None
        assert q.dtype == entry.dtype == (format or jnp.float32)
    loaded = interop.load_into(model, checkpoint, _rename)
    q = loaded.layers[0].self_attn.q_proj.weight
    assert eqq.is_quantized(q) == is_quantized and q.dtype == jnp.float32

    # As the package for such files reads it, and puts the rows back.
    import gguf

    def dense(tensor):
        w = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        w = w.reshape(tensor.shape[::-1])
        for key, number in heads.items():
            if f"attn_{key}." in tensor.name:
                w = (
                    w.reshape(number, -1, 2, w.shape[-1])
                    .swapaxes(1, 2)
                    .reshape(w.shape)
                )
        return jnp.asarray(w)

    tensors = gguf.GGUFReader(path).tensors
    reference = {tensor.name: dense(tensor) for tensor in tensors}
    reference = interop.load_into(model, reference, _rename)
    for x, w in zip(_leaves(loaded), _leaves(reference), strict=True):
        w_of_x = x.dequantize() if eqq.is_quantized(x) else x
        np.testing.assert_array_equal(w_of_x, w)
    tokens = jnp.arange(7)
    logits, expected = eqx.filter_jit(loaded)(tokens), eqx.filter_jit(reference)(tokens)
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)


def _leaves(tree):
    return jax.tree.leaves(tree, is_leaf=eqq.is_quantized)


def test_written_by_other_names(model, tmp_path):
    names, metadata = to_gguf(model, eqq.formats.Q8_0())
    interop.write_gguf(tmp_path / "a.gguf", names, metadata)
    q_model = interop.load_into(model, interop.open(tmp_path / "a.gguf"), _rename)
    rename = [{"lm_head.*": "lm_head.*", "*": "model.*"}, "llama"]
    interop.write_gguf(tmp_path / "b.gguf", q_model, metadata, rename=rename)

    import gguf

    first, second = [gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in "ab"]
    expected = {tensor.name: tensor for tensor in first.tensors}
    assert expected.keys() == {tensor.name for tensor in second.tensors}
    for tensor in second.tensors:
        # With rows of queries and keys as llama.cpp has them.
        np.testing.assert_array_equal(tensor.data, expected[tensor.name].data)
    # From names of Hugging Face.
    by_name = {"model.norm.weight": names["output_norm.weight"], "other": normal(2)}
    interop.write_gguf(tmp_path / "c.gguf", by_name, rename=["llama", ("other", None)])
    assert list(interop.open(tmp_path / "c.gguf")) == ["output_norm.weight"]


def test_into_a_skeleton(model, tmp_path):
    names, metadata = to_gguf(model, eqq.formats.Q8_0())
    interop.write_gguf(tmp_path / "a.gguf", names, metadata)
    checkpoint = interop.open(tmp_path / "a.gguf")
    skeleton = eqx.filter_eval_shape(Llama, jr.key(0))
    loaded = interop.load_into(skeleton, checkpoint, _rename)
    full = interop.load_into(model, checkpoint, _rename)
    assert trees_equal(loaded, full)


def test_gptq(tmp_path):
    made = {}
    for i, name in enumerate(("layers.0", "layers.1")):
        tensors, config, _ = files.gptq(32, 32, seed=i, name=f"model.{name}")
        made |= tensors | {f"model.{name}.bias": normal(32)}
    files.save(tmp_path / "model.safetensors", made, config)
    mlp = eqx.nn.MLP(32, 32, 32, 1, key=jr.key(0))
    checkpoint = interop.open(tmp_path)
    loaded = interop.load_into(mlp, checkpoint, ("model.*", "*"))
    q = loaded.layers[0].weight
    assert eqq.is_quantized(q) and q.axis == -1 and q.dtype == jnp.float32
    x = normal(32)
    dense = eqq.tree_dequantize(loaded)
    np.testing.assert_allclose(loaded(x), dense(x), rtol=1e-4, atol=1e-4)
    by_hand = checkpoint["model.layers.0.weight"].astype(jnp.float32).dequantize()
    assert np.all(dense.layers[0].weight == by_hand)


def test_everything_that_does_not_fit(model):
    names, _ = to_gguf(model, None)
    del names["blk.0.ffn_up.weight"], names["output_norm.weight"]
    names["blk.0.ffn_down.weight"] = names["blk.0.ffn_down.weight"].T
    names["blk.7.attn_q.weight"] = names["more"] = normal(2)
    names["output.weight"] = names["output.weight"].astype(jnp.int32)
    names["model.embed_tokens.weight"] = normal(2)
    with pytest.raises(ValueError) as e:
        interop.load_into(model, names, _rename)
    message = str(e.value)
    for line in (
        "'layers.0.mlp.up_proj.weight' is missing",
        "'norm.weight' is missing",
        "'blk.7.attn_q.weight' is not used, as 'layers.7.self_attn.q_proj.weight'",
        "Is it 'layers.",
        "'more' is not used",
        "'layers.0.mlp.down_proj.weight' should have shape (256, 512)",
        "It is transposed",
        "'lm_head.weight' should be of float32. Got 'output.weight' of int32",
        "'embed_tokens.weight' is both 'model.embed_tokens.weight' and 'token_embd",
    ):
        assert line in message, message
    with pytest.raises(ValueError, match="names of llama.cpp: see `rename`"):
        interop.load_into(model, names)


def test_not_strict():
    model = {"a": normal(2), "b": normal(3), "n": 3}
    with pytest.warns(UserWarning, match="(?s)'c' is not used.*'b' is missing"):
        loaded = interop.load_into(
            model, {"a": normal(2, seed=1), "c": 1.0 * normal(1)}, strict=False
        )
    assert np.all(loaded["a"] == normal(2, seed=1))
    assert loaded["b"] is model["b"] and loaded["n"] == 3
    with pytest.raises(ValueError, match="should have shape"):
        interop.load_into(model, {"a": normal(3), "b": normal(3)}, strict=False)


@pytest.mark.parametrize(
    "rename, name, expected",
    [
        (None, "a.b", ("a.b",)),
        ({"a.*": "*"}, "a.b.c", ("b.c",)),
        ({"a.*.c": "x*y"}, "a.b.c", ("xby",)),
        ({"*.a.*": "*-*"}, "x.a.y.a.z", ("x-y.a.z",)),
        ({"a": None}, "a", ()),
        ({"a": ("b", "c")}, "a", ("b", "c")),
        ({"b": "c"}, "a", ("a",)),
        ({"a*": "1*", "*b": "2*"}, "ab", ("1b",)),
        ([("a", "b"), ("b", "c")], "a", ("c",)),
        ([{"a": ["b", "x"]}, ("b", None)], "a", ("x",)),
        (str.upper, "a", ("A",)),
        (
            "llama",
            "blk.3.attn_k_norm.weight",
            ("model.layers.3.self_attn.k_norm.weight",),
        ),
        ("qwen", "blk.3.attn_q.bias", ("model.layers.3.self_attn.q_proj.bias",)),
        ("mistral", "output.weight", ("lm_head.weight",)),
        ("llama", "rope_freqs.weight", ()),
        ("llama", "model.norm.weight", ("model.norm.weight",)),
    ],
)
def test_rename(rename, name, expected):
    found = (
        interop.load_into(
            {k: 0 * normal(1) for k in expected}, {name: normal(1)}, rename
        )
        if expected
        else {}
    )
    assert tuple(found) == expected
    assert all(np.all(x == normal(1)) for x in found.values())


@pytest.mark.parametrize(
    "rename, error, match",
    [
        ("lama", ValueError, "tables llama, mistral, qwen"),
        (1, TypeError, "`rename` should be"),
        ({"*": "a"}, ValueError, r"as many \*"),
        (lambda name: 1, TypeError, "`rename` should give"),
    ],
)
def test_rename_that_is_none(rename, error, match):
    with pytest.raises(error, match=match):
        interop.load_into({"a": normal(1)}, {"a": normal(1)}, rename)


def test_placed_as_in_the_model():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, P("x"))
    w = jax.device_put(normal(64, 32), sharding)
    q = eqq.quantize(normal(64, 32, seed=1), "nf4", axis=-1)
    loaded = interop.load_into([w, w], {"0": q, "1": normal(64, 32)})
    assert loaded[0].is_sharded and loaded[1].sharding == sharding
    assert np.all(loaded[0].dequantize() == q.dequantize())


def test_one_array_in_two_places():
    q = eqq.quantize(normal(64, 32), "nf4", axis=-1)
    model = {"embedding": normal(64, 32), "head": normal(64, 32)}
    loaded = interop.load_into(model, {"w": q}, {"w": ("embedding", "head")})
    assert loaded["embedding"].stored["codes"] is loaded["head"].stored["codes"]


def test_two_arrays_of_one_name():
    model = {"a.b": jnp.zeros(3), "a": {"b": jnp.ones(3)}}
    weights = {"x": jnp.zeros(3)}
    with raises(ValueError, "model", "different names", "'a.b' twice"):
        eqq.interop.load_into(model, weights)
    with raises(ValueError, "tree", "different names", "'a.b' twice"):
        eqq.interop.load_into(weights, model)
