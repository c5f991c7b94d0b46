import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqquant as eqq
from eqquant.train import (
    bitnet,
    FakeQuantized,
    straight_through,
    tree_fake_quantize,
    tree_freeze,
)

from ..helpers import error, main_formats, normal, trees_equal
from ..test_layers import all_layers


key = jr.key(0)


def fake(tree):
    leaves = jtu.tree_leaves(tree, is_leaf=lambda x: isinstance(x, FakeQuantized))
    return [leaf for leaf in leaves if isinstance(leaf, FakeQuantized)]


def mlp(width=64):
    return eqx.nn.MLP(70, 10, width, 2, key=key)


@eqx.filter_jit
def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def trained(model, steps=5, optimizer=optax.adam(1e-2)):
    x, y = normal(16, 70), normal(16, 10, seed=1)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        value, gradients = eqx.filter_value_and_grad(loss)(model, x, y)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        # Optax multiplies the number of steps, an integer, with decay rates.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, parameters)
        return eqx.apply_updates(model, updates), state, value

    values = []
    for _ in range(steps):
        model, state, value = step(model, state)
        values.append(value)
    return model, values


some_formats = pytest.mark.parametrize(
    "format", (eqq.NF4(), eqq.Int4(symmetric=False), eqq.Ternary(scale="tensor"))
)


@pytest.mark.examples(1)
@main_formats
def test_frozen_is_the_last_fake_quantized(format):
    _check_frozen(format)


@pytest.mark.thorough
@some_formats
@pytest.mark.parametrize(
    "options", (dict(step_sizes=True), dict(activation="int8", clip=True))
)
def test_frozen_with_options(format, options):
    _check_frozen(format, **options)


# Inputs are rounded as products with the packed weights will: rotated.
@pytest.mark.examples(1)
@pytest.mark.parametrize("options", (dict(activation="int8"), {}))
def test_frozen_when_rotated(options):
    _check_frozen(eqq.Rotated(eqq.Int4(32)), **options)


def _check_frozen(format, **options):
    model = tree_fake_quantize(mlp(), format, **options)
    assert len(fake(model)) == 2  # the head is small
    model, values = trained(model)
    assert values[-1] < values[0]
    frozen = tree_freeze(model)
    weights = zip(model.layers, frozen.layers)
    for old, new in [(a.weight, b.weight) for a, b in weights][:2]:
        assert eqq.is_quantized(new) and new.format == format and new.axis == -1
        assert new.activation == (eqq.Int8() if "activation" in options else None)
        assert np.array_equal(new.dequantize(), jax.jit(lambda w: w.dequantize())(old))
    x = normal(16, 70, seed=2)
    run = eqx.filter_jit(lambda model: jax.vmap(model)(x))
    y, expected = np.asarray(run(frozen)), np.asarray(run(model))
    # An activation half-way between two integers may go either way.
    tolerance = 3e-2 if "activation" in options else 1e-5
    assert np.max(np.abs(y - expected)) < tolerance * np.max(np.abs(expected))
    assert trees_equal(tree_freeze(frozen), frozen)


# The gradient of every weight is that of the model with the rounded weights in place.
@pytest.mark.examples(1)
@some_formats
def test_gradients(format):
    model = tree_fake_quantize(mlp(), format)
    rounded = jtu.tree_map(
        lambda w: w.dequantize() if isinstance(w, FakeQuantized) else w,
        model,
        is_leaf=lambda w: isinstance(w, FakeQuantized),
    )
    x, y = normal(16, 70), normal(16, 10, seed=1)
    got, expected = (eqx.filter_grad(loss)(m, x, y) for m in (model, rounded))
    for a, b in zip(jtu.tree_leaves(got), jtu.tree_leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_step_sizes_learn():
    model = tree_fake_quantize(mlp(), "int4", step_sizes=True)
    new, _ = trained(model, optimizer=optax.adam(1e-3))
    before, after = fake(model)[0], fake(new)[0]
    assert before.step_size.shape == before.freeze().scale.shape == (64, 2)
    assert np.array_equal(before.step_size, before.freeze().scale)
    assert not jnp.isclose(before.step_size, after.step_size, rtol=1e-4).any()
    # The scales are those that were learned, not those that the format would choose.
    scale = after.freeze().scale
    assert np.array_equal(scale, jnp.abs(after.step_size))
    other = eqq.quantize(after.weight, "int4", axis=-1).scale
    assert not jnp.isclose(scale, other, rtol=1e-4).any()


# A block that was zero at first has a step size of zero until this is trained, so the
# format chooses its scale.
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("format", ("int4", "nf4", "int8"))
def test_frozen_blocks_that_were_zero(format, dtype):
    layer = eqx.nn.Linear(64, 32, key=key)
    where = lambda layer: layer.weight
    layer = eqx.tree_at(where, layer, layer.weight.at[:16].set(0))
    model = tree_fake_quantize(layer, format, step_sizes=True)
    assert jnp.all(model.weight.step_size[:16] == 0)
    where = lambda model: model.weight.weight
    model = eqx.tree_at(where, model, normal(32, 64))
    cast = lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a
    model = jtu.tree_map(cast, model)
    found = tree_freeze(model).weight.dequantize()
    np.testing.assert_array_equal(found, model.weight.dequantize())
    assert jnp.any(found[:16] != 0)


@pytest.mark.examples(1)
@all_layers
def test_layers_are_untouched(make, call, number):
    layer = make()
    model = tree_fake_quantize(layer, "int4", embeddings=True)
    assert type(model) is type(layer) and len(fake(model)) == number
    x = normal(7, 64)
    frozen = eqq.tree_quantize(layer, "int4", embeddings=True)
    assert jtu.tree_structure(tree_freeze(model)) == jtu.tree_structure(frozen)
    compiled = eqx.filter_jit(call)
    expected = compiled(frozen, x)
    for run in (call, compiled):
        y = run(model, x)
        assert y.shape == expected.shape and y.dtype == expected.dtype
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


# Whatever `tree_quantize` takes, by the same code.
def test_filter_spec():
    model = mlp()
    rules = eqq.Rules([("layers.0.*", "int8"), ("layers.2.*", "nf4"), ("*", None)])
    spec = eqx.tree_at(
        lambda m: m.layers[1].weight, jtu.tree_map(lambda _: False, model), "int4"
    )
    for args in ((), ("binary",), (rules,), (spec,), (True, eqq.Int8())):
        got = tree_freeze(tree_fake_quantize(model, *args))
        assert trees_equal(got, eqq.tree_quantize(model, *args))
    assert len(fake(tree_fake_quantize(model, min_size=10**6))) == 0
    with pytest.raises(ValueError, match="matches no array"):
        tree_fake_quantize(model, eqq.Rules([("layer.*", "int8")]))
    # In two steps, of which the second leaves the first as it is.
    once = tree_fake_quantize(model, eqq.Rules([("layers.0.*", "int8")]))
    twice = tree_fake_quantize(once, eqq.Rules([("*", "nf4")]))
    assert [w.format for w in fake(twice)] == [eqq.Int8(), *[eqq.NF4()] * 2]
    assert twice.layers[0].weight is once.layers[0].weight
    mixed = tree_fake_quantize(eqq.tree_quantize(model, rules), "int4")
    assert [w.format for w in fake(mixed)] == [eqq.Int4()]


@pytest.mark.examples(1)
@main_formats
def test_products(format):
    w = normal(70, 40)
    fq = tree_fake_quantize(w, format)
    q = tree_freeze(fq)
    assert isinstance(fq, FakeQuantized) and eqq.is_quantized(q)
    assert (fq.shape, fq.ndim, fq.size, fq.dtype) == (q.shape, q.ndim, q.size, q.dtype)
    right = [normal(70), normal(3, 70), normal(2, 3, 70)]
    left = [normal(40), normal(40, 3), normal(2, 40, 3)]
    found, expected = _uses(fq, right, left), _uses(q, right, left)
    dense = np.asarray(q.dequantize())
    for x, y in zip(right, found["right"]):
        assert error(y, x, dense) < 1e-6
    for x, y in zip(left, found["left"]):
        assert error(y, dense, x) < 1e-6
    assert np.array_equal(found["dequantize"], dense.T)
    assert np.array_equal(found["row"], dense[3])
    assert np.array_equal(found["sum"], dense + 1)
    assert np.array_equal(found["multiple"], 2 * dense)
    np.testing.assert_allclose(
        found["transposed"], expected["transposed"], rtol=1e-4, atol=1e-4
    )
    described = lambda uses: jtu.tree_map(lambda y: (y.shape, y.dtype), uses)
    assert described(found) == described(expected)


# As one program, and so compiled once.
@jax.jit
def _uses(q, right, left):
    return {
        "right": [x @ q for x in right],
        "left": [q @ x for x in left],
        "transposed": q.T @ right[0],
        "dequantize": q.T.dequantize(),
        "row": q[3],
        "sum": q + 1.0,
        "multiple": 2 * q,
        "narrow": right[1].astype(jnp.bfloat16) @ q,
    }


# Outside of `jit` too, and of arrays of NumPy.
def test_eager_products():
    fq, x = tree_fake_quantize(normal(70, 40), "int8"), normal(3, 70)
    for y in (x @ fq, np.asarray(x) @ fq, fq.T @ x[0]):
        assert isinstance(y, jax.Array)
    np.testing.assert_allclose(fq.T @ x[0], (x @ fq)[0], rtol=1e-4, atol=1e-4)
    assert np.array_equal(np.asarray(x) @ fq, x @ fq)
    assert np.array_equal(fq[3], fq.dequantize()[3])


@pytest.mark.thorough
def test_stacks():
    w = normal(3, 70, 40)
    fq = tree_fake_quantize(w, eqq.Ternary(scale="tensor"), step_sizes=True)
    one = fq[1]
    assert isinstance(one, FakeQuantized) and one.shape == (70, 40)
    assert np.array_equal(one.dequantize(), fq.dequantize()[1])
    assert isinstance(fq[:2], FakeQuantized) and len(fq) == 3
    x = normal(3, 5, 70)
    _, y = jax.lax.scan(lambda _, wx: (None, wx[1] @ wx[0]), None, (fq, x))
    np.testing.assert_allclose(y, x @ fq, rtol=1e-5, atol=1e-5)
    mapped = eqx.filter_vmap(lambda w, x: x @ w)(fq, x)
    np.testing.assert_allclose(mapped, x @ fq, rtol=1e-5, atol=1e-5)
    assert np.array_equal(fq.freeze().dequantize(), fq.dequantize())
    with pytest.raises(ValueError, match="use `.mT`"):
        fq.T


def test_activations_are_rounded_row_by_row():
    w, x = normal(70, 40), normal(3, 70)
    fq = tree_fake_quantize(w, "int8", activation="int4")
    expected = straight_through(x, "int4", axis=-1)
    np.testing.assert_allclose(x @ fq, expected @ fq.dequantize(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fq.T @ x.T, (x @ fq).T, rtol=1e-5, atol=1e-5)
    # Straight through to the rows as they were, and to the weights.
    of_x, of_w = jax.grad(lambda x, fq: jnp.sum(x @ fq), (0, 1))(x, fq)
    ones = jnp.ones((3, 40))
    np.testing.assert_allclose(of_x, ones @ fq.dequantize().T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_w.weight, expected.T @ ones, rtol=1e-4, atol=1e-4)


def test_bitnet():
    model = bitnet(mlp())
    weights = fake(model)
    assert [w.format for w in weights] == [eqq.Ternary(scale="tensor")] * 2
    assert [w.activation for w in weights] == [eqq.Int8()] * 2
    w = np.asarray(weights[0].weight, np.float64)
    gamma = np.abs(w).mean()
    expected = np.clip(np.round(w / gamma), -1, 1) * gamma
    np.testing.assert_allclose(weights[0].dequantize(), expected, rtol=1e-5)


def test_errors():
    with pytest.raises(ValueError, match="`layers.0.weight`: `format` should be one"):
        tree_fake_quantize(mlp(), eqq.RSRTernary())
    with pytest.raises(ValueError, match="`activation` should be a format"):
        tree_fake_quantize(mlp(), activation=eqq.Ternary(scale="tensor"))
    with pytest.raises(ValueError, match="Unknown format name"):
        tree_fake_quantize(mlp(), activation="int9")
    model = tree_fake_quantize(mlp(), "int8")
    model = eqx.tree_at(
        lambda m: m.layers[0].weight.weight, model, replace_fn=lambda w: w * jnp.nan
    )
    with pytest.raises(ValueError, match="`w` should be finite"):
        tree_freeze(model)
    with pytest.raises(TypeError, match="`q.dequantize"):
        np.asarray(fake(model)[0])
