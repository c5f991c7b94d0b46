"""What is said of a tree holds for its parts, its skeleton, and inside of `filter_jit`;
and what is not done is not passed over in silence."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array

import eqquant as eqq

from ..helpers import all_formats, normal, trees_equal


def _mlp():
    return eqx.nn.MLP(64, 64, 64, depth=1, key=jr.key(0))


_dense = _mlp()
_quantized = {
    name: eqq.tree_quantize(_dense, format)
    for name, format in {"int8": "int8", "nested": "nested(nf4(16), int8(32))"}.items()
}

_is_none = lambda x: x is None
_parts = {
    "inexact": lambda q: eqx.filter(q, eqx.is_inexact_array),
    "not inexact": lambda q: eqx.filter(q, eqx.is_inexact_array, inverse=True),
    "not arrays": lambda q: eqx.filter(q, eqx.is_array, inverse=True),
    "none": lambda q: jtu.tree_map(lambda _: None, q),
    "booleans": lambda q: jtu.tree_map(lambda _: True, q),
    "is_inexact": lambda q: jtu.tree_map(eqx.is_inexact_array, q),
    "trainable_spec": eqq.trainable_spec,
    "skeleton": lambda q: eqx.filter_eval_shape(lambda: q),
    "numpy": jax.device_get,
}


@pytest.mark.parametrize("part", _parts.values(), ids=_parts)
@pytest.mark.parametrize("q", _quantized.values(), ids=_quantized)
def test_parts(q, part, tmp_path):
    tree = part(q)
    repr(tree)
    has_weight = eqq.is_quantized(tree.layers[0].weight) and all(
        a is not None and not isinstance(a, bool)
        for a in jtu.tree_leaves(tree.layers[0].weight.stored, is_leaf=_is_none)
    )
    paths = {row.path for row in eqq.report(tree).rows}
    assert ("layers.0.weight" in paths) == has_weight
    found = eqq.audit(lambda tree, x: x, tree, jnp.ones(2)).operands
    assert len(found) == 2 * has_weight
    assert jtu.tree_structure(eqq.tree_quantize(tree)) == jtu.tree_structure(tree)
    assert jtu.tree_structure(eqq.tree_prepack(tree, "cpu")) == jtu.tree_structure(tree)
    spec = eqq.trainable_spec(tree)
    assert spec.layers[0].weight is False
    stored = jtu.tree_leaves(tree.layers[0].weight)
    if not any(map(eqx.is_array_like, stored)):
        dense = eqq.tree_dequantize(tree).layers[0].weight
        assert dense is None or (dense.shape, dense.dtype) == ((64, 64), jnp.float32)
    if not stored:
        eqq.save(tmp_path / "part", tree)
        again = eqq.load(tmp_path / "part", like=tree)
        assert trees_equal(again, tree)


@pytest.mark.parametrize("q", _quantized.values(), ids=_quantized)
def test_parts_are_combined(q):
    parts = eqx.partition(q, eqx.is_inexact_array)
    dense = eqx.combine(*map(eqq.tree_dequantize, parts))
    assert trees_equal(dense, eqq.tree_dequantize(q))


@pytest.mark.examples(3)
@all_formats
def test_skeletons(format):
    def make():
        return {
            "in": jnp.ones((64, 512)),
            "layer": eqx.nn.Linear(512, 64, key=jr.key(0)),
        }

    inside = eqx.filter_eval_shape(lambda: eqq.tree_quantize(make(), format))
    outside = eqq.tree_quantize(eqx.filter_eval_shape(make), format)
    assert eqx.tree_equal(inside, outside)
    assert outside["layer"].weight.shape == (64, 512)
    assert outside["layer"].bias.shape == (64,)


@pytest.mark.parametrize("platform", ("gpu", "tpu"))
def test_skeletons_are_prepacked(platform):
    model = eqq.tree_quantize(_dense, "ternary")
    skeleton = eqx.filter_eval_shape(lambda: model)
    packed = eqx.filter_eval_shape(lambda: eqq.tree_prepack(model, platform))
    assert eqx.tree_equal(eqq.tree_prepack(skeleton, platform), packed)


def test_skeletons_are_loaded(tmp_path):
    eqq.save(tmp_path / "model", _quantized["int8"])
    skeleton = eqq.tree_quantize(eqx.filter_eval_shape(_mlp), "int8")
    assert trees_equal(eqq.load(tmp_path / "model", like=skeleton), _quantized["int8"])


def test_placed_skeletons(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("a",))
    sharding = NamedSharding(mesh, P("a"))
    struct = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    (skeleton,) = eqq.tree_quantize([struct], "int8")
    assert skeleton.sharding == sharding.update(spec=P("a", None))
    eqq.save(tmp_path / "model", [eqq.quantize(normal(64, 64), "int8")])
    (loaded,) = eqq.load(tmp_path / "model", like=[skeleton])
    assert loaded.is_sharded and loaded.placement.spec == P("a", None)


@pytest.mark.parametrize("donate", ("all", "all-except-first", "warn", "none"))
def test_inside_of_filter_jit(donate):
    jitted = eqx.filter_jit(_mlp(), donate=donate)
    q = eqq.tree_quantize(jitted, "int8")
    assert type(q) is type(jitted)
    settings = lambda j: (j.donate_first, j.donate_rest, j.filter_warning)
    assert settings(q) == settings(jitted)
    assert trees_equal(q.__wrapped__, _quantized["int8"])
    if donate == "none":
        x = normal(64)
        np.testing.assert_allclose(q(x), _quantized["int8"](x), rtol=1e-5, atol=1e-6)
    again = eqq.tree_dequantize(q)
    assert trees_equal(again.__wrapped__, eqq.tree_dequantize(_quantized["int8"]))
    for model in (q, {"a": [q]}):
        rows = eqq.report(model, jitted if model is q else {"a": [jitted]}).rows
        assert [row.format is not None for row in rows] == [True, False, True, False]
    rules = eqq.Rules([("*layers.1.weight", "nf4")])
    layers = eqq.tree_quantize({"a": jitted}, rules)["a"].__wrapped__.layers
    assert [eqq.is_quantized(layer.weight) for layer in layers] == [False, True]


class Unknown(eqx.Module):
    kernel: Array

    def __call__(self, x):
        return x @ self.kernel


_unknown = {
    "unknown": (lambda: Unknown(normal(64, 64)), "`kernel`: Unknown is not a known"),
    "several": (lambda: [Unknown(normal(64, 64))] * 9, r"and 6 more\."),
    "skeleton": (
        lambda: eqx.filter_eval_shape(lambda: Unknown(normal(64, 64))),
        "register_owner",
    ),
    "function": (lambda: jax.jit(_mlp()), "`model` is a function"),
    "closure": (lambda: jax.vmap(_mlp()), "Quantize the module"),
}


@pytest.mark.parametrize("make, match", _unknown.values(), ids=_unknown)
def test_a_warning_if_nothing_is_quantized(make, match):
    model = make()
    with pytest.warns(UserWarning, match=match):
        eqq.tree_quantize(model)
    # What is said of some is not said in vain.
    eqq.tree_quantize(model, eqq.Rules([]))
    eqq.tree_quantize(model, jtu.tree_map(lambda _: False, model))


def test_no_warning_if_there_is_nothing_to_quantize():
    model = Unknown(normal(64, 64))
    linear = eqx.nn.Linear(64, 64, key=jr.key(0))
    for tree in (
        *([], {}, None, 3.0, normal(3), eqx.nn.LayerNorm(64), Unknown(normal(2, 2))),
        *([Unknown(jnp.ones((64, 64), jnp.int32))], eqx.nn.Linear(4, 4, key=jr.key(0))),
        # Something is.
        *([model, linear], eqq.tree_quantize([model, linear])),
    ):
        eqq.tree_quantize(tree)


def test_what_stands_for_weights_is_told():
    fake = eqq.train.tree_fake_quantize(_mlp(), "int8", step_sizes=True)
    adapted = eqq.train.lora(_mlp(), 4, key=jr.key(0))
    for model in (fake, adapted):
        rows = [row for row in eqq.report(model).rows if row.reason != "a vector"]
        assert rows
        for row in rows:
            assert "train" in row.reason or "frozen" in row.reason
            assert "register_owner" not in row.hint and row.hint
        # They are not taken for modules that are not known of.
        with pytest.warns(UserWarning, match="Nothing is quantized"):
            same = eqq.tree_quantize(model)
        assert jtu.tree_structure(same) == jtu.tree_structure(model)
    reasons = {row.path: row.reason for row in eqq.report(fake).rows}
    assert reasons["layers.0.weight.weight"] == "trains to be stored in Int8()"
