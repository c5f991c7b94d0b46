import dataclasses
import functools as ft
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jaxtyping import Array

import eqquant as eqq
from eqquant import report

from ..helpers import native_formats, normal


# Most of the model below has other uses than `tree_quantize` knows.
pytestmark = pytest.mark.filterwarnings("ignore:Only .* are quantized")


class Positions(eqx.Module):
    table: Array


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key):
        embedding = eqx.nn.Embedding(80, 32, key=key)
        head = eqx.nn.Linear(32, 80, use_bias=False, key=key)
        self.shared = eqx.nn.Shared(
            (embedding, head), lambda x: x[1].weight, lambda x: x[0].weight
        )


class Model(eqx.Module):
    linear: eqx.nn.Linear
    small: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    embedding: eqx.nn.Embedding
    tied: Tied
    positions: Positions
    conv: eqx.nn.Conv1d
    reparametrised: eqx.nn.WeightNorm
    step: Array
    name: str

    def __init__(self):
        key = jr.key(0)
        self.linear = eqx.nn.Linear(64, 48, key=key)
        self.small = eqx.nn.Linear(4, 4, use_bias=False, key=key)
        self.norm = eqx.nn.LayerNorm((32, 64))
        self.embedding = eqx.nn.Embedding(80, 32, key=key)
        self.tied = Tied(key)
        self.positions = Positions(normal(64, 32))
        self.conv = eqx.nn.Conv1d(32, 32, 3, key=key)
        self.reparametrised = eqx.nn.WeightNorm(eqx.nn.Linear(64, 48, key=key))
        self.step = jnp.asarray(0)
        self.name = "model"


@ft.cache
def _model():
    def fill(x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return (
            normal(*x.shape) if x.dtype == jnp.float32 else jnp.zeros(x.shape, x.dtype)
        )

    return jax.tree.map(fill, eqx.filter_eval_shape(Model))


@ft.cache
def _quantized():
    return eqq.tree_quantize(_model())


def _rows(*args):
    return {row.path: row for row in report(*args).rows}


def test_quantized_row():
    model = _model()
    row = _rows(_quantized(), model)["linear.weight"]
    q = eqq.quantize(model.linear.weight, axis=-1)
    assert row.shape == (48, 64)
    assert row.dtype == "float32"
    assert row.format == "NF4()"
    assert row.activation is None
    assert row.axis == -1
    assert row.bits_per_weight == 4.5
    assert row.before == 48 * 64 * 4
    assert row.after == 48 * 64 / 2 + 48 * 4 == q.nbytes
    assert (row.reason, row.hint, row.tied_to) == ("", "", None)
    assert row.sqnr is not None and 19 < row.sqnr < 22


def test_dense_row():
    model = _model()
    rows = _rows(_quantized(), model)
    row = rows["linear.bias"]
    assert (row.format, row.activation, row.axis) == (None, None, None)
    assert row.before == row.after == 48 * 4
    assert row.bits_per_weight == 32
    assert row.sqnr == math.inf
    assert rows["step"].sqnr is None


@pytest.mark.parametrize(
    "path, word, way",
    [
        ("linear.bias", "vector", ""),
        ("conv.bias", "bias", ""),
        ("norm.weight", "LayerNorm", ""),
        ("small.weight", "1024", "min_size"),
        ("embedding.weight", "embedding", "embeddings=True"),
        ("tied.shared.pytree.0.weight", "tied", "embeddings=True"),
        ("positions.table", "Positions", "example="),
        ("conv.weight", "convolution", "example="),
        ("reparametrised.layer.weight", "WeightNorm", "example="),
        ("step", "int32", ""),
    ],
)
def test_reasons(path, word, way):
    model = _quantized()
    found = report(model)
    (row,) = [row for row in found.rows if row.path == path]
    assert word in row.reason
    assert way in row.hint and bool(way) == bool(row.hint)
    assert path in str(found)
    assert row.reason in " ".join(str(found).split())


def test_every_array_has_a_row():
    model = _model()
    arrays = [x for x in jax.tree.leaves(model) if eqx.is_array(x)]
    assert len(report(model).rows) == len(arrays)


def test_not_quantized_yet():
    row = _rows(_model())["linear.weight"]
    assert row.reason == "not quantized yet"
    assert "NF4" in row.hint
    rules = eqq.Rules([("linear.*", None), ("*", "int8")])
    assert "linear.*" in _rows(_model(), None, rules)["linear.weight"].reason
    assert "Int8" in _rows(_model(), None, rules)["embedding.weight"].hint


def test_rules_may_match_nothing():
    rules = eqq.Rules([("nothing", None), ("*", "int8")])
    model = eqq.tree_quantize(_model(), rules, strict=False)
    assert _rows(model, None, rules)["linear.weight"].format == "Int8()"


def test_total():
    model = _model()
    found = report(_quantized())
    total = found.total
    arrays = [x for x in jax.tree.leaves(model) if eqx.is_array(x)]
    saved = 48 * 64 * 4 - (48 * 64 // 2 + 48 * 4)
    assert total.arrays == len(arrays)
    assert total.quantized == 1
    assert total.before == sum(x.nbytes for x in arrays)
    assert total.after == total.before - saved
    assert total.size == sum(x.size for x in arrays)
    assert total.ratio == total.before / total.after
    assert total.bits_per_weight == 8 * total.after / total.size


def test_rows_are_plain_data():
    model = _model()
    rows = report(_quantized(), model).rows
    again = json.loads(json.dumps([dataclasses.asdict(row) for row in rows]))
    for row, fields in zip(rows, again):
        assert fields == dataclasses.asdict(row) | {"shape": list(row.shape)}


@native_formats
def test_bytes_of_formats(format):
    w = jax.ShapeDtypeStruct((32, 3, 200), jnp.float32)
    q = jax.eval_shape(lambda w: eqq.quantize(w, format, axis=-1), w)
    (row,) = report(q).rows
    stored = jax.tree.leaves(q.stored)
    assert row.after == sum(a.size * a.dtype.itemsize for a in stored)
    assert row.before == 32 * 3 * 200 * 4
    assert row.bits_per_weight == 8 * row.after / (32 * 3 * 200)


def test_activation():
    (row,) = report(eqq.quantize(normal(32, 32), "int8", activation="int8")).rows
    assert row.activation == "Int8()"


def test_tuple_axis():
    (row,) = report(eqq.quantize(normal(8, 4, 16), axis=(-2, -1))).rows
    assert row.axis == (-2, -1)


def test_tied_dense():
    w = normal(32, 32)
    first, second = report([w, w, w + 1], [w, w, w]).rows[:2]
    assert (first.tied_to, first.before, first.after) == (None, 4096, 4096)
    assert (second.tied_to, second.before, second.after) == ("0", 0, 0)
    assert second.sqnr == math.inf


def test_tied_quantized():
    w = normal(32, 32)
    q = eqq.quantize(w)
    # The same object, another view of its stored arrays, and a copy of them.
    model = [q, q, q.T, eqq.quantize(w)]
    found = report(model)
    assert [row.tied_to for row in found.rows] == [None, "0", "0", None]
    assert [row.after for row in found.rows] == [q.nbytes, 0, 0, q.nbytes]
    assert [row.before for row in found.rows] == [4096, 0, 0, 4096]
    assert (found.total.arrays, found.total.size) == (2, 2 * 32 * 32)
    assert found.total.before == 2 * 4096
    assert "tied to 0" in str(found)
    # Ties before and after need not be the same.
    untied = report(model, [w, w, w.T, w + 0])
    assert [row.before for row in untied.rows] == [4096, 0, 4096, 4096]
    assert untied.total.before == 3 * 4096
    assert untied.total.after == 2 * q.nbytes


def test_shared():
    model = Tied(jr.key(0))
    found = report(eqq.tree_quantize(model, embeddings=True), model)
    assert [row.path for row in found.rows] == ["shared.pytree.0.weight"]
    assert found.total.before == 80 * 32 * 4


def test_skeleton():
    model = _model()
    skeleton = eqx.filter_eval_shape(eqq.tree_quantize, model)
    assert report(skeleton) == report(_quantized())
    struct = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    first, second = report({"a": struct, "b": struct}).rows
    assert (first.dtype, first.before) == ("bfloat16", 32 * 64 * 2)
    assert (second.tied_to, second.before) == ("a", 0)


def test_traced():
    model = _quantized()
    expected = report(model)

    @eqx.filter_jit
    def f(model):
        assert report(model) == expected

    f(model)


def test_dense_may_be_quantized():
    w = normal(64, 64)
    fine, coarse = eqq.quantize(w, "int8"), eqq.quantize(w, "nf4")
    (row,) = report(coarse, fine).rows
    (expected,) = report(coarse, fine.dequantize()).rows
    assert row.sqnr == expected.sqnr


def test_dense_mismatch():
    w, v = normal(32, 32), normal(32)
    model = eqq.tree_quantize({"a": w, "b": {"c": v}})
    with pytest.raises(ValueError, match=r"first differ at `b\.c`"):
        report(model, {"a": w})
    with pytest.raises(ValueError, match=r"first differ at `b\.d`"):
        report(model, {"a": w, "b": {"c": v, "d": v}})
    with pytest.raises(ValueError, match=r"first differ at `a2`"):
        report(model, {"a": w, "a2": w, "b": {"c": v}})
    with pytest.raises(ValueError, match=r"f32\[32,31\] at `a`, .* f32\[32,32\]"):
        report(model, {"a": w[:, 1:], "b": {"c": v}})
    with pytest.raises(ValueError, match=r"i32\[32\] at `b\.c`"):
        report(model, {"a": w, "b": {"c": jnp.arange(32)}})
    skeleton = eqx.filter_eval_shape(lambda: model)
    for trees in ((skeleton, model), (model, skeleton)):
        with pytest.raises(ValueError, match=r"Struct` at `a\.stored\.codes`"):
            report(*trees)


def test_random_keys():
    found = report({"key": jr.key(0)}, {"key": jr.key(1)})
    (row,) = found.rows
    assert row.dtype == "key<fry>"
    assert row.sqnr is None
    assert "key<fry>[]" in str(found)


class Own(eqx.Module):
    whole: Array
    parts: Array
    corner: Array
    table: Array
    left: Array
    right: Array

    def __call__(self, x):
        halves = x[:, :16] @ self.parts[:16] + x[:, 16:] @ self.parts[16:]
        blocks = self.corner.reshape(4, 8, 32)[1:3, :2]
        corner = jnp.einsum("tgs,gso->to", x[:, :4].reshape(5, 2, 2), blocks)
        pair = x @ (self.left @ self.right)
        return x @ self.whole + halves + pair + corner + jnp.sort(self.table)[:1]


def test_example():
    model = Own(*jr.normal(jr.key(0), (6, 32, 32)))
    x = jnp.ones((5, 32))
    not_told = "multiplied by the example, but along unknown axes"
    with pytest.warns(match=not_told):
        q = eqq.tree_quantize(model, example=x, min_size=0)
    found = eqq.report(q, model, example=x)
    whole, parts, corner, table, left, right = found.rows
    assert whole.axis == parts.axis == -2
    assert corner.reason == not_told
    among = "multiplied by the example, but only with other arrays of the model"
    assert left.reason == right.reason == among
    assert table.reason.endswith("by the example, but used in `sort`")
    assert "not a known owner" in eqq.report(q, model).rows[2].reason


# (Of skeletons: nothing is compiled.)
def test_weights_in_training():
    w = {"w": jnp.zeros((64, 32))}

    def made():
        rounded = eqq.train.tree_compute(w, forward="fp8")
        return {
            "fake": eqq.train.tree_fake_quantize(w, format="int4", step_sizes=True),
            "lora": eqq.train.lora(w, 4, key=jr.key(0))[0],
            "compute": eqq.train.tree_preround(rounded),
        }

    rows = report(eqx.filter_eval_shape(made)).rows
    reasons = {row.path.replace(".w.", "."): (row.reason, row.hint) for row in rows}
    freeze = "`train.tree_freeze` packs it"
    assert reasons["fake.weight"] == ("trains to be stored in Int4()", freeze)
    assert reasons["fake.step_size"] == ("a step size, which trains", freeze)
    assert reasons["lora.base"][0] == "the base of an adapter, which is frozen"
    assert reasons["lora.a"][0] == reasons["lora.b"][0] == "of an adapter, which trains"
    wanted = "trains in float32; its products are computed in FP8()"
    assert reasons["compute.weight"] == (wanted, freeze)
    wanted = ("rounded to FP8() by `train.tree_preround`", "")
    assert reasons["compute.rounded.stored.codes"] == wanted


def test_the_least_size():
    key = jr.key(0)
    layers = [eqx.nn.Linear(n, n, key=key) for n in (8, 24, 40)]
    quantized = eqq.tree_quantize(layers, "int8", min_size=256)
    reason = lambda *args, **kwargs: report(*args, **kwargs).rows[0].reason
    assert reason(quantized) == "fewer numbers than `min_size`"
    assert reason(quantized, min_size=256) == "fewer than 256 numbers"
    # Nothing tells that this was not so.
    usual = eqq.tree_quantize(layers, "int8")
    assert reason(usual) == "fewer than 1024 numbers"
    assert report(usual, min_size=256).rows[2].reason == "not quantized yet"


# What is stored counts, and blocks are stored whole.
def test_padding():
    key = jr.key(0)
    layers = [eqx.nn.Linear(n, 64, key=key) for n in (576, 576, 768)]
    found = report(eqq.tree_quantize(layers, "q2_k"))
    assert [row.padding for row in found.rows if row.format] == [192, 192, 0]
    assert [row.bits_per_weight for row in found.rows[::2]] == [3.5, 3.5, 2.625]
    (line,) = [line for line in repr(found).splitlines() if "whole" in line]
    assert "768 numbers for each 576, in *.weight → Int(2, 64)" in line
    assert "whole" not in repr(report(eqq.tree_quantize(layers, "nf4")))
