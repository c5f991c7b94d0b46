import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqquant as eqq

from .helpers import formats, normal, trees_equal


@pytest.fixture(autouse=True)
def standard_promotion():
    # Optax multiplies the number of steps, an integer, with decay rates.
    with jax.numpy_dtype_promotion("standard"):
        yield


class Model(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    second: eqx.nn.Linear

    def __init__(self, key):
        a, b = jr.split(key)
        self.first = eqx.nn.Linear(70, 40, key=a)
        self.norm = eqx.nn.LayerNorm(40)
        self.second = eqx.nn.Linear(40, 30, key=b)

    def __call__(self, x):
        return self.second(jnp.tanh(self.norm(self.first(x))))


def quantized(format):
    return eqq.tree_quantize(Model(jr.key(0)), format)


def quantized_leaves(model):
    leaves = jtu.tree_leaves(model, is_leaf=eqq.is_quantized)
    return [leaf for leaf in leaves if eqq.is_quantized(leaf)]


def assert_untouched(new, old):
    new, old = quantized_leaves(new), quantized_leaves(old)
    assert len(new) == len(old) == 2
    assert all(trees_equal(a, b) for a, b in zip(new, old))


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


optimiser = optax.adamw(1e-2, weight_decay=0.1)


@eqx.filter_jit
def step(model, state, x):
    value, gradients = eqx.filter_value_and_grad(loss)(model, x)
    trained = eqx.filter(model, eqx.is_inexact_array)
    updates, state = optimiser.update(gradients, state, trained)
    return eqx.apply_updates(model, updates), state, value


@eqx.filter_jit
def step_of_part(trained, frozen, state, x):
    def part_loss(trained):
        return loss(eqx.combine(trained, frozen), x)

    value, gradients = eqx.filter_value_and_grad(part_loss)(trained)
    updates, state = optimiser.update(gradients, state, trained)
    return eqx.apply_updates(trained, updates), state, value


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("nf4", "int4-affine", "nested"))
def test_training_filtered_by_inexact_arrays(name):
    model = old = quantized(formats[name])
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    x = normal(16, 70)
    values = []
    for _ in range(4):
        model, state, value = step(model, state, x)
        values.append(value)
    assert_untouched(model, old)
    assert values == sorted(values, reverse=True)
    assert not np.array_equal(model.first.bias, old.first.bias)
    assert not np.array_equal(model.norm.weight, old.norm.weight)


def test_training_filtered_by_trainable_spec():
    model = quantized("nf4")
    trained, frozen = eqx.partition(model, eqq.trainable_spec(model))
    assert_untouched(frozen, model)
    assert len(jtu.tree_leaves(trained)) == 4
    state = optimiser.init(trained)
    x = normal(16, 70)
    first = loss(model, x)
    for _ in range(4):
        trained, state, value = step_of_part(trained, frozen, state, x)
    new = eqx.combine(trained, frozen)
    assert value < first
    assert_untouched(new, model)


# The loss falls as it would with the dequantized weights, held fast.
def test_training_is_that_of_the_dequantized_model():
    model = quantized("int8")
    dense = eqq.tree_dequantize(model)
    spec = eqq.trainable_spec(model)
    x = normal(16, 70)
    trained, frozen = eqx.partition(model, spec)
    state = optimiser.init(trained)
    dense_spec = jtu.tree_map(
        lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim < 2, dense
    )
    dense_trained, dense_frozen = eqx.partition(dense, dense_spec)
    dense_state = optimiser.init(dense_trained)
    for _ in range(4):
        trained, state, value = step_of_part(trained, frozen, state, x)
        dense_trained, dense_state, dense_value = step_of_part(
            dense_trained, dense_frozen, dense_state, x
        )
        np.testing.assert_allclose(value, dense_value, rtol=1e-4)


@pytest.mark.examples(1)
@pytest.mark.parametrize("axis", ("first", "second"))
def test_stages_of_a_model(axis):
    # Gradients pass through a quantized layer to those before it.
    model = eqq.tree_quantize(Model(jr.key(0)), eqq.Rules([(f"{axis}.weight", "nf4")]))
    dense = eqq.tree_dequantize(model)
    x = normal(16, 70)
    gradient = eqx.filter_grad(loss)(model, x)
    expected = eqx.filter_grad(loss)(dense, x)
    for leaf in (
        lambda m: m.first.bias,
        lambda m: m.norm.weight,
        lambda m: m.second.bias,
    ):
        np.testing.assert_allclose(leaf(gradient), leaf(expected), rtol=1e-4, atol=1e-6)


def test_moving_average():
    old = quantized("nf4")
    new = eqx.tree_at(lambda m: m.first.bias, old, old.first.bias + 1)

    def average(a, b):
        return 0.9 * a + 0.1 * b if eqx.is_inexact_array(a) else a

    averaged = jtu.tree_map(average, old, new)
    assert_untouched(averaged, old)
    np.testing.assert_allclose(averaged.first.bias, old.first.bias + 0.1, rtol=1e-5)


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("nf4", "int8", "ternary-tensor", "nested"))
def test_cast(name):
    old = quantized(formats[name])

    def cast(a):
        return a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a

    narrow = jtu.tree_map(cast, old)
    assert_untouched(narrow, old)
    assert narrow.first.bias.dtype == jnp.bfloat16
    # Rows of bfloat16 meet a weight that was quantized from float32.
    y = jax.vmap(narrow)(normal(16, 70, dtype=jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    arrays, static = eqx.partition(old, eqx.is_inexact_array)
    assert_untouched(eqx.combine(jtu.tree_map(lambda a: 2 * a, arrays), static), old)


# That filter takes codes and scales as well, which have no gradients. An optimiser that
# keeps moments raises an error; one that does not leaves them as they are.
def test_training_filtered_by_arrays():
    model = quantized("nf4")
    arrays = eqx.filter(model, eqx.is_array)
    gradients = eqx.filter_grad(loss)(model, normal(16, 70))
    state = optimiser.init(arrays)
    with pytest.raises(ValueError, match="stored.*codes"):
        optimiser.update(gradients, state, arrays)
    sgd = optax.sgd(1e-2)
    updates, _ = sgd.update(gradients, sgd.init(arrays), arrays)
    new = eqx.apply_updates(model, updates)
    assert_untouched(new, model)
    assert not np.array_equal(new.first.bias, model.first.bias)


# Whatever turned the codes into floats, it is found out.
def test_floats_in_the_place_of_codes():
    q = eqq.quantize(normal(70, 5))
    floats = jtu.tree_map(lambda a: a + 0.5, q)
    products = lambda q: normal(2, 70) @ q
    for use in (products, lambda q: q.dequantize(), lambda q: q + 1.0):
        with pytest.raises(TypeError, match="should be integers"):
            use(floats)
