import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
import eqquant._progress
from eqquant._tree import decide

from .helpers import native_formats, normal, trees_equal


key = jr.key(0)


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    position: jax.Array
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    steps: jax.Array

    def __init__(self):
        self.embedding = eqx.nn.Embedding(96, 64, key=key)
        self.position = normal(32, 64)
        self.layers = [eqx.nn.Linear(64, 64, key=k) for k in jr.split(key, 2)]
        self.norm = eqx.nn.LayerNorm((32, 64))
        self.head = eqx.nn.Linear(64, 5, key=key)
        self.steps = jnp.zeros((64, 64), jnp.int32)


def _formats(model, *args, **kwargs):
    """The format of each leaf that is quantized, by its path."""
    decisions = decide(model, *args, **kwargs)
    return {d.info.path: d.format for d in decisions if d.format is not None}


def _reasons(model, *args, **kwargs):
    decisions = decide(model, *args, **kwargs)
    return {d.info.path: d.skip.reason for d in decisions if d.info and d.skip}


hidden = ("layers.0.weight", "layers.1.weight")
nf4, int8 = eqq.NF4(), eqq.Int8()


def test_default():
    assert _formats(Model()) == dict.fromkeys(hidden, nf4)
    reasons = _reasons(Model())
    assert reasons["embedding.weight"] == "an embedding"
    assert reasons["position"] == "Model is not a known owner of weights"
    assert reasons["layers.0.bias"] == "a vector"
    assert reasons["norm.weight"] == "a parameter of a LayerNorm"
    assert reasons["head.weight"] == "fewer than 1024 numbers"
    assert reasons["steps"] == "int32, not floating-point"


def test_format_or_its_name():
    assert _formats(Model(), int8) == dict.fromkeys(hidden, int8)
    assert _formats(Model(), "int8") == dict.fromkeys(hidden, int8)
    assert _formats(Model(), format="int8") == dict.fromkeys(hidden, int8)
    assert _formats(Model(), None) == {}
    assert _formats(Model(), False) == {}


def test_options():
    embedded = _formats(Model(), embeddings=True)
    assert embedded == dict.fromkeys(("embedding.weight", *hidden), nf4)
    small = _formats(Model(), min_size=0)
    assert small == dict.fromkeys((*hidden, "head.weight"), nf4)
    assert _formats(Model(), min_size=64 * 64) == dict.fromkeys(hidden, nf4)
    assert _formats(Model(), min_size=64 * 64 + 1) == {}


def test_prefix():
    model = Model()
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.layers[1].weight, spec, True)
    assert _formats(model, spec) == {"layers.1.weight": nf4}
    assert _formats(model, spec, int8) == {"layers.1.weight": int8}
    # What is named is quantized, small or not, and whoever owns it.
    for where in (
        lambda m: m.embedding.weight,
        lambda m: m.position,
        lambda m: m.head.weight,
    ):
        named = eqx.tree_at(where, jax.tree.map(lambda _: False, model), "int8")
        assert list(_formats(model, named).values()) == [int8]
    # A whole layer is not its parts.
    spec = eqx.tree_at(
        lambda m: (m.layers, m.embedding),
        jax.tree.map(lambda _: False, model),
        (int8, True),
    )
    assert _formats(model, spec) == dict.fromkeys(hidden, int8)
    mixed = {"a": int8, "b": None, "c": "nf4", "d": True}
    tree = {name: normal(64, 64) for name in "abcd"}
    assert _formats(tree, mixed, "binary") == {
        "a": int8,
        "c": nf4,
        "d": eqq.Binary(),
    }


def test_functions_of_leaves():
    def wide(leaf):
        return int8 if leaf.ndim == 2 and leaf.shape[0] == 96 else None

    assert _formats(Model(), wide) == {"embedding.weight": int8}
    assert _formats(Model(), eqx.is_inexact_array) == dict.fromkeys(hidden, nf4)
    tree = {"a": normal(64, 64), "b": normal(64, 64)}
    spec = {"a": lambda leaf: "int8", "b": False}
    assert _formats(tree, spec) == {"a": int8}


def test_rules():
    rules = eqq.Rules(
        [
            ("*embed*", "int8"),
            ("layers.0.*", None),
            (lambda info: info.field == "position", nf4),
            ("head*", True),
            ("*", nf4),
        ]
    )
    assert _formats(Model(), rules, "binary") == {
        "embedding.weight": int8,
        "position": nf4,
        "layers.1.weight": nf4,
        "head.weight": eqq.Binary(),
    }
    assert _reasons(Model(), rules)["layers.0.weight"] == (
        "left out by the rule 'layers.0.*'"
    )
    seen = []
    decide(Model(), eqq.Rules([(lambda info: seen.append(info), None)]), strict=False)
    (info,) = [info for info in seen if info.path == "layers.0.weight"]
    assert isinstance(info.owner, eqx.nn.Linear)
    assert (info.field, info.shape, info.dtype) == ("weight", (64, 64), jnp.float32)
    assert info.axis == -1


def test_rules_that_match_nothing():
    rules = eqq.Rules([("layer.0.weight", int8), ("*", nf4)])
    with pytest.raises(
        ValueError, match="'layer.0.weight' matches no.*layers.0.weight"
    ):
        eqq.tree_quantize(Model(), rules)
    eqq.tree_quantize(Model(), rules, strict=False)
    # A rule that another came before is not one that matches nothing.
    eqq.tree_quantize(Model(), eqq.Rules([("*", nf4), ("layers.*", int8)]))
    with pytest.raises(ValueError, match="Unknown format name 'nf5'.*nf4"):
        eqq.Rules([("*", "nf5")])


def test_axes():
    model = eqq.tree_quantize(Model())
    assert model.layers[0].weight.axis == -1
    tree = eqq.tree_quantize({"w": normal(64, 48), "list": [normal(48, 64)]})
    assert tree["w"].axis == -2 and tree["list"][0].axis == -2
    assert eqq.tree_quantize({"w": normal(64, 48)}, axis=1)["w"].axis == -1
    cell = eqq.tree_quantize(eqx.nn.GRUCell(64, 64, key=key))
    assert cell.weight_ih.axis == cell.weight_hh.axis == -1
    conv = eqx.nn.Conv2d(8, 16, 3, key=key)
    (decision, *_) = decide(conv)
    assert decision.info.axis == (-3, -2, -1)


def test_register_owner():
    class Dense(eqx.Module):
        kernel: jax.Array

    class Denser(Dense):
        pass

    assert _formats(Dense(normal(64, 64))) == {}
    eqq.register_owner(Dense, "kernel", axis=-2)
    for cls in (Dense, Denser):
        model = eqq.tree_quantize(cls(normal(64, 48)))
        assert model.kernel.axis == -2


def test_register_owner_takes_fields():
    class Dense(eqx.Module):
        kernel: eqx.AbstractVar[jax.Array]

    eqq.register_owner(Dense, "kernel", axis=-2)
    for cls, names in ((Dense, "kernel"), (eqx.nn.Linear, "weight")):
        with pytest.raises(ValueError, match=f"{cls.__name__}: .*{names}.*'kernle'"):
            eqq.register_owner(cls, "kernle", axis=-2)


def test_register_owner_takes_classes(unchecked):
    with pytest.raises(TypeError, match="`type` should be a class of modules. Got 3"):
        eqq.register_owner(3, "kernel", axis=-2)
    for axis in ("-1", (0, None), 1.0):
        with pytest.raises(TypeError, match="`axis` should be an integer"):
            eqq.register_owner(eqx.nn.Linear, "weight", axis=axis)
    assert list(_formats(eqx.nn.Linear(64, 64, key=key))) == ["weight"]


def test_stacked_layers():
    stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(64, 64, key=key))(
        jr.split(key, 32)
    )
    assert list(_formats(stacked)) == ["weight"]
    assert _reasons(stacked)["bias"] == "a bias"


@pytest.mark.examples(3)
@native_formats
def test_under_transformations(format):
    mlp = eqx.nn.MLP(64, 64, 64, 1, key=key)
    eager = eqq.tree_quantize(mlp, format)
    jitted = eqx.filter_jit(eqq.tree_quantize)(mlp, format)
    assert jax.tree.structure(eager) == jax.tree.structure(jitted)
    struct = eqx.filter_eval_shape(eqq.tree_quantize, mlp, format)
    weight = struct.layers[0].weight
    assert weight.shape == (64, 64) and weight.nbytes == eager.layers[0].weight.nbytes


def test_idempotent():
    once = eqq.tree_quantize(Model(), "int8")
    twice = eqq.tree_quantize(once, "nf4")
    assert twice.layers[0].weight is once.layers[0].weight
    dense = eqq.tree_dequantize(twice)
    assert jax.tree.structure(dense) == jax.tree.structure(Model())
    assert np.array_equal(dense.layers[0].weight, once.layers[0].weight.dequantize())


def test_nothing_is_mutated():
    model = Model()
    before = jax.tree.map(lambda leaf: leaf, model)
    eqq.tree_quantize(model)
    assert trees_equal(model, before)


def test_trainable_spec():
    model = eqq.tree_quantize(Model())
    trainable, frozen = eqx.partition(model, eqq.trainable_spec(model))
    assert not any(map(eqx.is_inexact_array, jax.tree.leaves(frozen)))
    assert all(map(eqx.is_inexact_array, jax.tree.leaves(trainable)))
    assert trees_equal(eqx.combine(trainable, frozen), model)
    # An array that is frozen has no place in the state of an optimizer.
    assert jax.tree.leaves(trainable.layers[0].weight) == []


def test_not_finite_weights_are_named():
    model = eqx.tree_at(
        lambda m: m.layers[1].weight,
        Model(),
        replace_fn=lambda w: w.at[3, 4].set(jnp.nan),
    )
    with pytest.raises(ValueError, match="`layers.1.weight`.*1 of its 4096 numbers"):
        eqq.tree_quantize(model)


# A progress bar for who waits, and nothing for who does not.
@pytest.mark.parametrize("terminal", (False, True))
@pytest.mark.parametrize("slow", (False, True))
def test_progress(slow, terminal, monkeypatch, capsys):
    clock = itertools.count(step=3)
    monkeypatch.setattr(eqquant._progress.time, "monotonic", lambda: next(clock) * slow)
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    eqq.tree_quantize({str(i): normal(64, 64) for i in range(3)})
    captured = capsys.readouterr()
    assert ("Quantizing" in captured.err) == (slow and terminal)
    assert captured.out == "" and (terminal or captured.err == "")


# An array that stays dense for an embedding is quantized elsewhere only by name.
def test_tied_to_an_embedding():
    embedding = eqx.nn.Embedding(64, 32, key=key)
    head = eqx.nn.Linear(32, 64, use_bias=False, key=key)
    model = embedding, eqx.tree_at(lambda m: m.weight, head, embedding.weight)
    _, head = eqq.tree_quantize(model)
    assert not eqq.is_quantized(head.weight)
    spec = (True, lambda leaf: eqq.NF4())
    embedding, head = eqq.tree_quantize(model, spec)
    assert eqq.is_quantized(head.weight)
    assert not eqq.is_quantized(embedding.weight)
