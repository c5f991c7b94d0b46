"""Filters of convolutions: how files have them, and that they run where they load."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from safetensors.numpy import save_file

import eqquant as eqq
from eqquant import interop
from eqquant._cli import main
from eqquant.interop import convert

from ..helpers import normal
from .same import same


class Net(eqx.Module):
    one: eqx.nn.Conv1d
    two: eqx.nn.Conv2d
    out: eqx.nn.WeightNorm

    def __init__(self, key):
        a, b, c = jr.split(key, 3)
        self.one = eqx.nn.Conv1d(16, 8, 3, padding=1, key=a)
        self.two = eqx.nn.Conv2d(4, 16, (3, 5), key=b)
        self.out = eqx.nn.WeightNorm(eqx.nn.Linear(16, 16, key=c))

    def __call__(self, x):
        y = self.two(x).reshape(16, -1)
        return self.out(jnp.mean(self.one(y), axis=0)[:16])


model, x = Net(jr.key(0)), normal(4, 8, 12)
names = {
    "one.weight": (1, 2),
    "two.weight": (1, 2, 3),
    "out.layer.weight": -1,
}


def arrays_of(model):
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture
def source(tmp_path):
    save_file(arrays_of(model), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.examples(1)
@pytest.mark.parametrize("format", ("int8", "nf4", "int4"))
def test_as_quantize(source, tmp_path, format):
    rules = [(name, format) for name in names]
    outcomes = {x.name: x for x in convert(source, tmp_path / "out", None, rules=rules)}
    checkpoint = interop.open(tmp_path / "out")
    for name, axis in names.items():
        expected = eqq.quantize(arrays_of(model)[name], format, axis=axis)
        assert same(checkpoint[name], expected)
        assert outcomes[name].axis == expected.axis


def decoded(w):
    """By one scale for each output, in 8 bits."""
    rows = w.reshape(len(w), -1).astype(np.float64)
    scale = np.abs(rows).max(1, keepdims=True) / 127
    return (np.round(rows / scale) * scale).reshape(w.shape).astype(np.float32)


def load_into(path):
    return interop.load_into(model, interop.open(path))


@pytest.mark.parametrize("load", (lambda path: eqq.load(path, like=model), load_into))
def test_into_a_dense_model(source, tmp_path, load):
    convert(source, tmp_path / "out", None, rules=[(name, "int8") for name in names])
    where = lambda m: [m.one.weight, m.two.weight, m.out.layer.weight]
    loaded = load(tmp_path / "out")
    assert all(map(eqq.is_quantized, where(loaded)))
    new = [jnp.asarray(decoded(np.asarray(w))) for w in where(model)]
    y = eqx.filter_jit(loaded)(x)
    np.testing.assert_allclose(y, eqx.tree_at(where, model, new)(x), atol=1e-5)
    # It is saved, and loads, as such.
    eqq.save(tmp_path / "again", loaded)
    again = eqq.load(tmp_path / "again", like=model)
    np.testing.assert_array_equal(eqx.filter_jit(again)(x), y)


def test_a_module_around_it_runs_on_call(tmp_path):
    class Outer(eqx.Module):
        conv: eqx.nn.Conv1d

        def __call__(self, x):
            return jax.lax.conv(x[None], self.conv.weight, (1,), "SAME")[0]

    outer = Outer(model.one)
    quantized = eqq.tree_quantize(outer, "int8", min_size=0, example=normal(16, 9))
    eqq.save(tmp_path / "a", quantized)
    loaded = eqq.load(tmp_path / "a", like=outer)
    structure = jax.tree_util.tree_structure
    assert structure(loaded) == structure(quantized)


def test_with_statistics(source, tmp_path):
    run = lambda m, x: jax.vmap(lambda x: m.two(x))(x)
    stats = eqq.calibrate(run, model, [normal(8, 4, 8, 12)])
    rules = [("two.weight", "int4")]
    convert(source, tmp_path / "out", None, rules=rules, stats=stats)
    rules = eqq.Rules([*rules, ("*", None)])
    expected = eqq.tree_quantize(model, rules, stats=stats, unsupported="on_call")
    assert same(interop.open(tmp_path / "out")["two.weight"], expected.two.weight)


def test_axes_that_the_shape_does_not_tell(tmp_path, capsys):
    # A filter with a window of 16 by 16, or a stack of stacks of matrices.
    w, path = normal(8, 3, 16, 16), tmp_path / "model.safetensors"
    # (Not by "patch.bias", which has no such axes.)
    save_file({"patch.weight": np.asarray(w), "patch.bias": np.ones(8, "f4")}, path)
    rules = [("patch.*", "int8")]
    with pytest.raises(ValueError, match=r"\('patch.weight', \(1, 2, 3\)\)"):
        convert(path, tmp_path / "out", rules=rules)
    axes = {-1: "-1", (1, 2, 3): "1,2,3", (-3, -2, -1): "-3,-2,-1"}
    for i, (axis, text) in enumerate(axes.items()):
        expected = eqq.quantize(w, "int8", axis=axis)
        out = tmp_path / str(i)
        convert(path, out, rules=rules, axis=[("patch.*", axis)])
        assert same(interop.open(out)["patch.weight"], expected)
        command = ["quantize", str(path), f"{out}-2", "--rule", "patch.*=int8"]
        assert main([*command, "--axis", f"patch.*={text}"]) == 0
        assert same(interop.open(f"{out}-2")["patch.weight"], expected)
    # With its axes, it is known to be a weight.
    convert(path, tmp_path / "known", "int8", axis=[("patch.*", (1, 2, 3))])
    assert same(interop.open(tmp_path / "known")["patch.weight"], expected)
    # Nothing is asked of an array that stays as it is.
    (_, outcome) = convert(path, tmp_path / "kept", "int8")
    assert outcome.reason == "the filter of a convolution, by its shape"
    command = ["quantize", str(path), str(tmp_path / "a"), "--rule", "patch.*=int8"]
    assert main(command) == 2
    assert "--axis 'patch.weight=1,2,3'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "axis, message",
    (
        ((1, 2, 4), r"'two.weight'.*between -4 and 3"),
        ((0, 1, 2, 3), r"'two.weight'.*leave out the axis of the outputs"),
        ((1, 1), "none twice"),
    ),
)
def test_wrong_axes(source, tmp_path, axis, message):
    rules = [("two.weight", "int8")]
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", rules=rules, axis=[("two.*", axis)])


def test_a_list_with_gaps(tmp_path):
    # As in PyTorch, some layers of a list have no arrays.
    keys = jr.split(jr.key(0), 2)
    linear = [eqx.nn.Linear(32, 32, key=key) for key in keys]
    like = {"layers": [linear[0], jax.nn.relu, linear[1]], "n.a": jnp.ones(3)}
    names = [(i, x) for i in (0, 2) for x in ("weight", "bias")]
    layers = like["layers"]
    arrays = {f"layers.{i}.{x}": np.asarray(getattr(layers[i], x)) for i, x in names}
    path = tmp_path / "a.safetensors"
    save_file(arrays | {"n.a": np.zeros(3, "f4")}, path)
    convert(path, tmp_path / "out", "int8", min_size=0)
    loaded = eqq.load(tmp_path / "out", like=like)
    assert loaded["layers"][1] is jax.nn.relu and not loaded["n.a"].any()
    for i in (0, 2):
        w = eqq.quantize(layers[i].weight, "int8", axis=-1)
        assert same(loaded["layers"][i].weight, w)
    like["layers"] = layers[:1]
    text = r"interop.load_into` can rename(?s:.*)layers.2.weight: expected nothing"
    with pytest.raises(ValueError, match=text):
        eqq.load(tmp_path / "out", like=like)


def test_few_columns(tmp_path):
    save_file({"w": np.ones((512, 8), "f4")}, tmp_path / "model.safetensors")
    (outcome,) = convert(tmp_path / "model.safetensors", tmp_path / "out")
    assert outcome.reason == "fewer than 16 numbers along the contracted axis"


def test_quantized_on_the_way():
    rename = {"two.weight": interop.Quantized("two.weight", "int8")}
    loaded = interop.load_into(model, arrays_of(model), rename)
    expected = eqq.quantize(model.two.weight, "int8", axis=(1, 2, 3))
    assert same(loaded.two.weight, expected)
    np.testing.assert_allclose(loaded(x), model(x), atol=0.02)


def test_again_along_the_same_axes(tmp_path):
    # Arrays that are quantized tell what products contract, and shapes do not.
    arrays = {
        "wide": eqq.quantize(normal(64, 96), "int8", axis=-2),
        "filter": eqq.quantize(normal(16, 4, 3, 3), "int8", axis=(1, 2, 3)),
        "last": eqq.quantize(normal(3, 3, 16, 32), "int8", axis=(0, 1, 2)),
        "first": eqq.quantize(normal(3, 64, 16), "int8", axis=(0, 1)),
    }
    eqq.save(tmp_path / "a.safetensors", arrays)
    again = dict(format="nf4", requantize=True, min_size=0)
    convert(tmp_path / "a.safetensors", tmp_path / "out", **again)
    tree = eqq.load(tmp_path / "out")
    for name, q in arrays.items():
        assert same(tree[name], eqq.quantize(q.dequantize(), "nf4", axis=q.axis))
    axis = [("wide", -1)]
    path = tmp_path / "other"
    convert(tmp_path / "a.safetensors", path, axis=axis, **again)
    q = eqq.quantize(arrays["wide"].dequantize(), "nf4", axis=-1)
    assert same(eqq.load(path)["wide"], q)


@pytest.mark.parametrize("to", ("gguf", "mlx", "compressed-tensors"))
def test_a_format_that_another_library_has(to, tmp_path):
    arrays = {f"{name}.weight": np.asarray(normal(64, 128)) for name in "ab"}
    save_file(arrays, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="(?s)2 arrays cannot.*--format") as e:
        convert(tmp_path / "a.safetensors", tmp_path / "out", "binary", to=to)
    example = str(e.value).rpartition("--format ")[2].removesuffix(").")
    convert(tmp_path / "a.safetensors", tmp_path / "out", example, to=to)
    if to == "gguf":
        # Not the one that was asked for.
        save_file({"a": np.ones((64, 33), "f4")}, tmp_path / "b.safetensors")
        with pytest.raises(ValueError, match="Rules give arrays another"):
            convert(tmp_path / "b.safetensors", tmp_path / "b", example, to=to)
