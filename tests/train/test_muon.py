import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dimensions

import eqquant as eqq
from eqquant.train import muon8bit, scale_by_muon8bit

from ..helpers import normal, trees_equal
from ..raises import raises


@pytest.fixture(autouse=True)
def standard_promotion():
    # Optax multiplies the number of steps, an integer, with decay rates.
    with jax.numpy_dtype_promotion("standard"):
        yield


shapes = {"wide": (24, 40), "tall": (40, 24), "kernel": (3, 4, 8), "bias": (40,)}


def trees(number):
    """Parameters, and gradients of as many steps."""
    draw = lambda i: {name: normal(*shapes[name], seed=i) for name in shapes}
    return draw(0), [draw(1 + i) for i in range(number)]


def outputs_first(params):
    return jtu.tree_map(lambda x: Dimensions(1, 0) if x.ndim == 2 else None, params)


# With momentum in float32, it is optax's in each of its ways.
@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "options",
    [
        dict(nesterov=False, weight_decay=0.1, adam_weight_decay=0.2),
        dict(adaptive=True, consistent_rms=0.2, adam_learning_rate=0.01),
        dict(preconditioning="aol", adam_b1=0.8, adam_b2=0.9, adam_eps_root=1e-6),
        dict(ns_coeffs=((3.0, -4.0, 2.0), (3.4, -4.8, 2.0)), weight_decay_mask=False),
        dict(muon_weight_dimension_numbers=outputs_first),
        dict(
            muon_weight_dimension_numbers={
                "wide": Dimensions(-1, 0),
                "tall": None,
                "kernel": Dimensions([0, 1], 2),
                "bias": None,
            }
        ),
    ],
)
def test_as_optax(options):
    params, gradients = trees(3)
    ours = muon8bit(0.1, beta=0.8, eps=1e-7, filter_spec=False, **options)
    theirs = optax.contrib.muon(0.1, beta=0.8, eps=1e-7, **options)
    state, expected_state = ours.init(params), theirs.init(params)
    for g in gradients:
        found, state = ours.update(g, state, params)
        expected, expected_state = jax.jit(theirs.update)(g, expected_state, params)
        for x, y in zip(found.values(), expected.values(), strict=True):
            # What is orthogonalized has rounding errors of its largest elements.
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.max(np.abs(y)))


def orthogonalized(x):
    """By the iteration, in float64."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


# From what is stored, the next update is that of float64.
@pytest.mark.parametrize("nesterov", (False, True))
def test_second_step(nesterov):
    first, g = normal(24, 40), normal(24, 40, seed=1)
    optimizer = scale_by_muon8bit(beta=0.8, nesterov=nesterov, min_size=0)
    _, state = optimizer.update(first, optimizer.init(first))
    assert eqq.is_quantized(state.mu)
    found, new = optimizer.update(g, state)
    g = np.asarray(g, np.float64)
    m = 0.8 * np.asarray(state.mu.dequantize(), np.float64).reshape(24, 40) + 0.2 * g
    corrected = m / (1 - 0.8**2)
    if nesterov:
        corrected = 0.8 * m / (1 - 0.8**3) + 0.2 * g / (1 - 0.8**2)
    expected = orthogonalized(corrected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    # And its momentum is stored to the distance of two points.
    error = np.abs(np.asarray(new.mu.dequantize()).reshape(24, 40) - m)
    assert np.max(error) <= 1.001 * 0.9 / 64 * np.max(np.abs(m))


# By default, all are matrices; dimension numbers may be given for many at once.
def test_dimension_numbers_of_many():
    params = {"a": [normal(24, 40), normal(40, 24)], "b": normal(8, 16)}
    update = lambda numbers: scale_by_muon8bit(weight_dimension_numbers=numbers).update
    state = scale_by_muon8bit().init(params)
    expected, _ = update(None)(params, state)
    for x, y in zip(jtu.tree_leaves(expected), jtu.tree_leaves(params), strict=True):
        y = np.asarray(y, np.float64)
        y = orthogonalized(y) if len(y) < len(y.T) else orthogonalized(y.T).T
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
    for numbers in (Dimensions(), {"a": Dimensions(), "b": Dimensions((0,), (-1,))}):
        found, _ = update(numbers)(params, state)
        assert trees_equal(found, expected)


# Each of one array, too, be it a matrix or not.
@pytest.mark.examples(2)
@pytest.mark.parametrize("name", shapes)
def test_one_array(name):
    params, (g,) = trees(1)
    ours, theirs = muon8bit(0.1, min_size=0), optax.contrib.muon(0.1)
    found, _ = ours.update(g[name], ours.init(params[name]), params[name])
    state = theirs.init(params[name])
    expected, _ = theirs.update(g[name], state, params[name])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


# Optax divides by zero.
@pytest.mark.parametrize("shape", ((0, 4), (4, 0)))
def test_empty(shape):
    params = {"empty": jnp.zeros(shape), "w": normal(24, 40)}
    optimizer = muon8bit(0.1)
    found, _ = optimizer.update(params, optimizer.init(params), params)
    alone, _ = optimizer.update(params["w"], optimizer.init(params["w"]), params["w"])
    assert found["empty"].shape == shape
    np.testing.assert_array_equal(found["w"], alone)


# In a loop of accumulated gradients, in bfloat16, whose state is donated.
def test_a_training_loop():
    model = eqx.nn.MLP(64, 8, 64, 2, dtype=jnp.bfloat16, key=jr.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    x = normal(32, 64, dtype=jnp.bfloat16)
    teacher = jnp.tanh(x @ normal(64, 8, seed=1, dtype=jnp.bfloat16) / 8)
    # A PyTree of the model's structure, which is callable as the model is.
    numbers = outputs_first(params)
    optimizer = muon8bit(0.03, muon_weight_dimension_numbers=numbers)
    optimizer = optax.MultiSteps(optimizer, 2)

    def step(carry, _):
        params, state = carry

        def loss(params):
            y = jax.vmap(eqx.combine(params, static))(x)
            return jnp.mean((y - teacher).astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    @ft.partial(jax.jit, donate_argnums=(0, 1))
    def train(params, state):
        return jax.lax.scan(step, (params, state), None, 60)

    state = optimizer.init(params)
    leaves = jtu.tree_leaves(state, is_leaf=eqq.is_quantized)
    codes = [q.stored["codes"] for q in leaves if eqq.is_quantized(q)]
    assert [a.size for a in codes] == [64 * 64, 64 * 64]
    (params, state), losses = train(params, state)
    assert all(a.is_deleted() for a in codes)
    assert {a.dtype for a in jtu.tree_leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert losses[-1] < 0.3 * losses[0]


def test_bad_input():
    with raises(ValueError, "params", "(40,)", "AdamW"):
        scale_by_muon8bit().init({"v": normal(40)})
    with raises(ValueError, "params", "complex64"):
        muon8bit(0.1).init({"w": jnp.ones((4, 4), jnp.complex64)})
