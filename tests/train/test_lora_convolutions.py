"""Adapters of the filters of convolutions."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.train import LoRA, lora, lora_only, merge_lora, tree_compute, with_lora

from ..helpers import normal


class Net(eqx.Module):
    conv: eqx.nn.Conv
    out: eqx.nn.Linear

    def __call__(self, x):
        return self.out(jnp.mean(self.conv(x).reshape(16, -1), 1))


def net(conv):
    return Net(conv, eqx.nn.Linear(16, 16, key=jr.key(9)))


key = jr.key(0)
# The layer, and the shape of its inputs.
layers = {
    "1d": (eqx.nn.Conv1d(8, 16, 3, stride=2, padding=1, key=key), (8, 20)),
    "2d": (eqx.nn.Conv2d(8, 16, (3, 2), dilation=2, key=key), (8, 9, 7)),
    "point": (eqx.nn.Conv2d(8, 16, 1, use_bias=False, key=key), (8, 5, 4)),
    "transposed": (eqx.nn.ConvTranspose2d(8, 16, 3, stride=2, key=key), (8, 4, 4)),
    "3d": (eqx.nn.Conv3d(4, 16, 2, key=key), (4, 4, 3, 5)),
    "groups": (eqx.nn.Conv1d(8, 16, 3, groups=2, key=key), (8, 12)),
}
run = eqx.filter_jit(lambda m, x: m(x))


def trained(adapted):
    b = normal(*adapted.conv.weight.b.shape, seed=2)
    return eqx.tree_at(lambda m: m.conv.weight.b, adapted, b)


def whole_of(w, dora=False):
    """The adapted filter, by NumPy in float64."""
    base = w.base.dequantize() if eqq.is_quantized(w.base) else w.base
    base, a, b = (np.asarray(v, float) for v in (base, w.a, w.b))
    rows = base.reshape(len(base), -1)
    new = rows + w.scale * b @ a
    if dora:
        norms = [np.linalg.norm(v, axis=1, keepdims=True) for v in (rows, new)]
        new = new * norms[0] / norms[1]
    return new.reshape(base.shape).astype(np.float32)


@pytest.mark.examples(3)
@pytest.mark.parametrize("kind", ("quantized", "dense", "on_call"))
@pytest.mark.parametrize("name", layers)
def test_as_the_sum(name, kind, tmp_path):
    layer, shape = layers[name]
    model, x = net(layer), normal(*shape)
    base, rules = model, eqq.Rules([("conv.weight", True), ("*", None)])
    if kind == "quantized":
        base = eqq.tree_quantize(model, "int8", example=x, min_size=0)
    elif kind == "on_call":
        base = eqq.tree_quantize(model, "nf4", unsupported="on_call", min_size=0)
    spec = rules if kind == "dense" else True
    adapted, trains = lora(base, 4, spec, min_size=0, key=jr.key(1))
    w = adapted.conv.weight
    assert isinstance(w, LoRA) and isinstance(adapted.conv, type(layer))
    assert w.a.shape == (4, layer.weight[0].size)
    assert w.b.shape == (len(layer.weight), 4)
    np.testing.assert_allclose(run(adapted, x), run(base, x), rtol=1e-4, atol=1e-5)

    new = trained(adapted)
    put = lambda m, w: eqx.tree_at(lambda m: m.conv.weight, m, w)
    dense = put(eqq.tree_dequantize(base), whole_of(new.conv.weight))
    expected = run(dense, x)
    np.testing.assert_allclose(run(new, x), expected, rtol=1e-4, atol=1e-4)
    batched = jax.jit(jax.vmap(new))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(batched[0], expected, rtol=1e-4, atol=1e-4)

    # The gradients of the thin matrices are those of the sum.
    thin, rest = eqx.partition(new, trains)
    loss = lambda thin: jnp.sum(jnp.sin(eqx.combine(thin, rest)(x)))
    found = eqx.filter_jit(eqx.filter_grad(loss))(thin).conv.weight
    of_dense = lambda v: jnp.sum(jnp.sin(put(dense, v)(x)))
    by_row = jax.jit(jax.grad(of_dense))(dense.conv.weight).reshape(len(w.b), -1)
    for got, wanted in (
        (found.a, w.scale * new.conv.weight.b.T @ by_row),
        (found.b, w.scale * by_row @ w.a.T),
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)

    # A file keeps them; and merging gives the filter, in a layer as it was.
    eqq.save(tmp_path / "a", lora_only(new))
    again, _ = with_lora(base, eqq.load(tmp_path / "a"))
    assert jtu.tree_structure(again) == jtu.tree_structure(new)
    np.testing.assert_array_equal(run(again, x), run(new, x))
    merged = merge_lora(new)
    np.testing.assert_allclose(merged.conv.weight, dense.conv.weight, atol=1e-5)
    if kind == "dense":
        assert jtu.tree_structure(merged) == jtu.tree_structure(model)
    packed = merge_lora(new, "int8")
    assert packed.conv.weight.axis == w.axis
    np.testing.assert_allclose(run(packed, x), expected, atol=0.1)


def test_dora():
    layer, shape = layers["2d"]
    base = eqq.tree_quantize(net(layer), "int8", unsupported="on_call", min_size=0)
    adapted, _ = lora(base, 4, dora=True, min_size=0, key=jr.key(1))
    new, x = trained(adapted), normal(*shape)
    whole = whole_of(new.conv.weight, dora=True)
    dense = eqx.tree_at(lambda m: m.conv.weight, eqq.tree_dequantize(base), whole)
    np.testing.assert_allclose(run(new, x), run(dense, x), rtol=1e-4, atol=1e-4)


def test_filters_with_channels_last():
    # As Flax has them: (height, width, in, out).
    w, x = normal(3, 3, 8, 16), normal(2, 6, 7, 8, seed=1)
    conv = lambda w, x: jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    run = lambda tree, x: eqq.implicit(conv)(tree["w"], x)
    tree = eqq.tree_quantize({"w": w}, "int8", example=(run, (x,)), min_size=0)
    adapted, _ = lora(tree, 4, min_size=0, key=jr.key(1))
    q = adapted["w"]
    q = dataclasses.replace(q, b=normal(16, 4, seed=2))
    rows = np.asarray(q.base.dequantize(), float).reshape(-1, 16).T
    whole = (rows + q.scale * np.asarray(q.b, float) @ np.asarray(q.a, float)).T
    expected = conv(jnp.asarray(whole.reshape(w.shape), jnp.float32), x)
    np.testing.assert_allclose(run({"w": q}, x), expected, rtol=1e-4, atol=1e-4)


def test_the_sum_is_never_made():
    layer, shape = layers["2d"]
    base = eqq.tree_quantize(net(layer), "int8", unsupported="on_call", min_size=0)
    adapted, _ = lora(base, 4, min_size=0, key=jr.key(1))
    thin, rest = eqx.partition(adapted, eqq.train.lora_spec(adapted))
    loss = lambda thin, x: jnp.sum(eqx.combine(thin, rest)(x))
    text = str(jax.make_jaxpr(loss)(thin, normal(*shape)))
    assert "f32[16,48] = dot_general" not in text
    assert text.count("= conv_general_dilated") == 2


def test_in_fewer_bits():
    # The frozen filter is rounded, and the adapter is not.
    layer, shape = layers["2d"]
    x = normal(*shape)
    base = tree_compute(layer, "int8", example=x, min_size=0)
    rules = eqq.Rules([("weight", True)])
    adapted, _ = lora(base, 4, rules, min_size=0, key=jr.key(1))
    new = eqx.tree_at(lambda m: m.weight.b, adapted, normal(16, 4, seed=2))
    w = new.weight
    rows = w.scale * np.asarray(w.b, float) @ np.asarray(w.a, float)
    part = jnp.asarray(rows.reshape(w.shape), jnp.float32)
    where = lambda m: (m.weight, m.bias)
    more = eqx.tree_at(where, layer, (part, jnp.zeros_like(layer.bias)))(x)
    np.testing.assert_allclose(run(new, x), run(base, x) + more, rtol=1e-4, atol=1e-4)
    assert jnp.max(jnp.abs(run(base, x) - layer(x))) > 1e-4


@pytest.mark.parametrize("quantized", (True, False))
def test_weight_norm(quantized):
    # It makes its weight of an array, which is what has the adapter.
    model = eqx.nn.WeightNorm(eqx.nn.Linear(24, 16, key=key))
    base = model
    if quantized:
        base = eqq.tree_quantize(model, "int8", unsupported="on_call", min_size=0)
    spec = True if quantized else eqq.Rules([("layer.weight", True)])
    adapted, _ = lora(base, 4, spec, min_size=0, key=jr.key(1))
    new = eqx.tree_at(lambda m: m.layer.weight.b, adapted, normal(16, 4, seed=2))
    x, whole = normal(24), whole_of(new.layer.weight)
    dense = eqx.tree_at(lambda m: m.layer.weight, model, jnp.asarray(whole))
    np.testing.assert_allclose(run(new, x), dense(x), rtol=1e-4, atol=1e-4)


def test_a_dense_layer_stays_as_it_is():
    model = net(layers["2d"][0])
    text = "No adapters for `conv.weight`, of a layer that needs dense"
    with pytest.warns(UserWarning, match=text):
        adapted, _ = lora(model, 4, min_size=0, key=jr.key(1))
    assert type(adapted.conv) is type(model.conv)
    assert eqx.is_array(adapted.conv.weight) and isinstance(adapted.out.weight, LoRA)
