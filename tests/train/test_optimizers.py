import functools as ft
import importlib.util
import inspect

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
    adamw4bit,
    adamw8bit,
    ema8bit,
    lion8bit,
    muon8bit,
    scale_by_adam4bit,
    scale_by_adam8bit,
    scale_by_lion8bit,
)

from ..helpers import normal, trees_equal
from ..raises import raises


@pytest.fixture(autouse=True)
def standard_promotion():
    # Optax multiplies the number of steps, an integer, with decay rates.
    with jax.numpy_dtype_promotion("standard"):
        yield


def moments(state):
    leaves = jtu.tree_leaves(state, is_leaf=eqq.is_quantized)
    # Of what is frozen there is none: a quantized array without its arrays.
    return [x for x in leaves if jtu.tree_leaves(x) and x.ndim > 0]


def is_8bit(tree):
    return jtu.tree_map(eqq.is_quantized, tree, is_leaf=eqq.is_quantized)


def test_bytes():
    params = {"w": normal(300, 200), "v": normal(100, 60)}
    state = scale_by_adam8bit().init(params)
    assert is_8bit(state.mu) == is_8bit(state.nu) == {"w": True, "v": True}
    assert state.mu["w"].format == eqq.Dynamic8(256, signed=True, dithered=True)
    assert state.nu["w"].format == eqq.Dynamic8(256, signed=False, dithered=True)
    size = sum(x.size for x in params.values())
    assert sum(x.nbytes for x in moments(state)) <= 2.1 * size
    for optimizer in (scale_by_lion8bit(), ema8bit(0.9), muon8bit(0.1)):
        state = optimizer.init(params)
        assert sum(x.nbytes for x in moments(state)) <= 1.03 * size
        assert all(jnp.all(x.dequantize() == 0) for x in moments(state))
    state = scale_by_adam4bit().init(params)
    assert state.mu["w"].format == eqq.Square4(128, signed=True, dithered=True)
    assert state.nu["w"].format == eqq.Square4(128, signed=False, dithered=True)
    assert sum(x.nbytes for x in moments(state)) <= 1.07 * size
    assert all(jnp.all(x.dequantize() == 0) for x in moments(state))


def test_what_stays_in_float32():
    model = {
        "embedding": eqx.nn.Embedding(300, 32, key=jr.key(0)),
        "linear": eqx.nn.Linear(32, 300, key=jr.key(0)),
        "frozen": eqq.quantize(normal(64, 64)),
        "plain": normal(64, 64, dtype=jnp.bfloat16),
    }
    params = eqx.filter(model, eqx.is_inexact_array)

    def found(**options):
        mu = scale_by_adam8bit(**options).init(params).mu
        assert all(x.dtype == jnp.float32 for x in moments(mu))
        return [
            name
            for name, x in (
                ("embedding", mu["embedding"].weight),
                ("linear", mu["linear"].weight),
                ("bias", mu["linear"].bias),
                ("plain", mu["plain"]),
            )
            if eqq.is_quantized(x)
        ]

    assert found() == ["linear", "plain"]
    assert found(embeddings=True) == ["embedding", "linear", "plain"]
    assert found(min_size=300) == ["linear", "bias", "plain"]
    assert found(min_size=5000) == ["linear"]
    spec = {"embedding": True, "linear": True, "frozen": True, "plain": False}
    assert found(filter_spec=spec) == ["linear"]
    assert found(filter_spec=lambda x: x.dtype == jnp.bfloat16) == ["plain"]


# Until something is rounded, it is optax's. That is after the first step, or never.
@pytest.mark.examples(1)
@pytest.mark.parametrize("min_size", (0, 10**6))
def test_as_optax(min_size):
    params = {"w": normal(30, 20), "v": normal(70)}
    state_options = dict(min_size=min_size)
    momentum = ema8bit(0.8, debias=False, **state_options)
    pairs = [
        (
            adamw8bit(0.1, 0.8, 0.95, 1e-6, 1e-9, 0.2, **state_options),
            optax.adamw(0.1, 0.8, 0.95, 1e-6, 1e-9, None, 0.2),
        ),
        (
            adamw4bit(0.1, 0.8, 0.95, 1e-6, 1e-9, 0.2, **state_options),
            optax.adamw(0.1, 0.8, 0.95, 1e-6, 1e-9, None, 0.2),
        ),
        (
            scale_by_adam8bit(0.8, nesterov=True, **state_options),
            optax.scale_by_adam(0.8, nesterov=True),
        ),
        (
            lion8bit(0.1, 0.8, 0.95, 0.2, **state_options),
            optax.lion(0.1, 0.8, 0.95, None, 0.2),
        ),
        (ema8bit(0.8, **state_options), optax.ema(0.8)),
        (
            optax.chain(momentum, optax.sgd(0.1 / (1 - 0.8))),
            optax.sgd(0.1, momentum=0.8),
        ),
        (
            optax.chain(optax.adafactor(0.1), momentum),
            optax.adafactor(0.1, momentum=0.8),
        ),
    ]
    for ours, theirs in pairs:
        state, expected_state = ours.init(params), theirs.init(params)
        update, expected_update = jax.jit(ours.update), jax.jit(theirs.update)
        for i in range(1 if min_size == 0 else 3):
            grads = {"w": normal(30, 20, seed=i), "v": normal(70, seed=9 + i)}
            updates, state = update(grads, state, params)
            expected, expected_state = expected_update(grads, expected_state, params)
            for x, y in zip(jtu.tree_leaves(updates), jtu.tree_leaves(expected)):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


# What is kept of each moment is what optax has, up to the distance of two points.
@pytest.mark.parametrize(
    "make, gaps",
    [
        (scale_by_adam8bit, (0.9 / 64, 0.9 / 128)),
        (scale_by_adam4bit, (13 / 49, 31 / 256)),
    ],
)
def test_moments(make, gaps):
    params = {"w": normal(30, 20)}
    grads = {"w": normal(30, 20, seed=1)}
    ours, theirs = make(min_size=0), optax.scale_by_adam()
    _, state = ours.update(grads, ours.init(params))
    _, expected = theirs.update(grads, theirs.init(params))
    assert state.count == expected.count == 1
    pairs = (state.mu["w"], expected.mu["w"]), (state.nu["w"], expected.nu["w"])
    for (found, wanted), gap in zip(pairs, gaps):
        error = np.abs(found.dequantize() - wanted.reshape(-1))
        assert np.max(error) <= 1.001 * gap * np.max(np.abs(wanted))


# From what is stored, the next update is that of float64. (An odd number of codes of
# four bits ends within a byte.)
@pytest.mark.examples(1)
@pytest.mark.parametrize("nesterov", (False, True))
def test_second_step(nesterov):
    first, g = normal(31, 21), normal(31, 21, seed=1)
    exact = lambda q: np.asarray(q.dequantize(), np.float64).reshape(31, 21)

    def second(optimiser):
        _, state = optimiser.update(first, optimiser.init(first))
        updates, _ = optimiser.update(g, state)
        return updates, state

    g64 = np.asarray(g, np.float64)
    for debias in (False, True):
        found, state = second(ema8bit(0.8, debias, min_size=0))
        expected = 0.8 * exact(state.ema) + 0.2 * g64
        expected = expected / (1 - 0.8**2) if debias else expected
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    for make in (scale_by_adam8bit, scale_by_adam4bit):
        found, state = second(make(0.8, 0.9, nesterov=nesterov, min_size=0))
        m = 0.8 * exact(state.mu) + 0.2 * g64
        v = 0.9 * exact(state.nu) + 0.1 * g64**2
        corrected = m / (1 - 0.8**2)
        if nesterov:
            corrected = 0.8 * m / (1 - 0.8**3) + 0.2 * g64 / (1 - 0.8**2)
        expected = corrected / np.sqrt(v / (1 - 0.9**2))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# Each step rounds by less than the distance of two points, `gap * end`, and the next
# ones forget it, by `decay` each.
def test_a_running_mean_of_many_steps():
    ours, theirs = (make(0.9, debias=False) for make in (ema8bit, optax.ema))
    params = {"w": normal(64, 64)}
    state, expected_state, error = ours.init(params), theirs.init(params), 0.0
    rounded = []
    for i in range(20):
        grads = {"w": normal(64, 64, seed=i)}
        found, state = ours.update(grads, state)
        expected, expected_state = theirs.update(grads, expected_state)
        difference = np.abs(found["w"] - expected["w"])
        assert np.max(difference) <= 1.001 * error + 1e-6
        rounded.append(np.mean(difference))
        error = 0.9 * (error + 0.9 / 64 * np.max(np.abs(found["w"])))
    # Errors that are independent grow less than their bound, and do not vanish.
    assert 0 < rounded[-1] < 0.2 * error


# A second moment that became zero would be divided by.
def test_small_gradients_next_to_large_ones():
    params = {"w": jnp.ones(512)}
    grads = {"w": jnp.ones(512).at[:500].set(1e-6)}
    optimiser = scale_by_adam8bit(min_size=0)
    state = optimiser.init(params)
    for _ in range(20):
        updates, state = optimiser.update(grads, state)
        assert np.all(jnp.abs(updates["w"]) < 1.1)
    assert np.all(state.nu["w"].dequantize() > 0)


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "make, name",
    [(adamw8bit, "b2"), (adamw4bit, "b2"), (lion8bit, "b2"), (muon8bit, "adam_b2")],
)
@pytest.mark.parametrize("injected", (False, True))
def test_dtypes_and_transformations(make, name, injected):
    params = {"w": normal(64, 64, dtype=jnp.bfloat16), "none": None}
    grads = {"w": normal(64, 64, seed=1, dtype=jnp.bfloat16), "none": None}
    if injected:
        sizes = {"block_size", "min_size", "ns_steps"}
        static_args = sizes & {*inspect.signature(make).parameters}
        make = optax.inject_hyperparams(make, static_args)
    # (Injected, they are of the gradients' dtype, in which 0.999 is one.)
    optimiser = make(learning_rate=1e-2, **{name: 0.9})
    state = optimiser.init(params)
    eager, eager_state = optimiser.update(grads, state, params)
    updates, new = jax.jit(optimiser.update)(grads, state, params)
    assert updates["w"].dtype == jnp.bfloat16
    assert trees_equal(eager, updates)
    assert trees_equal(eager_state, new)
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    assert jtu.tree_all(jtu.tree_map(same, new, state))
    struct = eqx.filter_eval_shape(optimiser.init, params)
    assert jtu.tree_all(jtu.tree_map(same, struct, state))
    masked = optax.masked(optimiser, {"w": True, "none": False})
    masked.update(grads, masked.init(params), params)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("make", (adamw8bit, adamw4bit, lion8bit, muon8bit))
def test_arguments_of_the_wrong_type(make):
    params = {"w": normal(64, 64)}
    for name in ("block_size", "min_size"):
        for value in ("x", 64.5):
            with raises(TypeError, name, "an integer", f"Got {value!r}"):
                make(1e-2, **{name: value}).init(params)
    for spec in ("int8", {"w": "int8"}, lambda x: "int8"):
        with raises(TypeError, "filter_spec", "booleans", "Got 'int8'"):
            make(1e-2, filter_spec=spec).init(params)


# All that a step of training takes, what it is given and what it allocates.
@pytest.mark.thorough
@pytest.mark.optimized
def test_memory():
    def nbytes(optimiser):
        def step(params, state, x):
            def loss(params):
                y = x
                for w in params:
                    y = jnp.tanh(y @ w)
                return jnp.sum(y)

            updates, state = optimiser.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        params = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
        state = jax.eval_shape(optimiser.init, params)
        x = jax.ShapeDtypeStruct((4, 512), jnp.float32)
        step = jax.jit(step, donate_argnums=(0, 1))
        memory = step.lower(params, state, x).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    assert nbytes(adamw8bit(1e-3)) < 0.8 * nbytes(optax.adamw(1e-3))
    # Three bytes of momentum for each parameter, and no momentum in float32.
    saved = nbytes(optax.contrib.muon(1e-3)) - nbytes(muon8bit(1e-3))
    assert saved > 0.98 * 3 * 8 * 512**2


# Nothing is hidden, and nothing raised that optax would not.
def test_gradients_that_are_not_finite():
    params = {"w": jnp.ones(512)}
    grads = {"w": jnp.ones(512).at[3].set(jnp.nan)}
    optimiser = scale_by_adam8bit(min_size=0)
    updates, state = optimiser.update(grads, optimiser.init(params))
    assert jnp.isnan(updates["w"][3])
    np.testing.assert_allclose(updates["w"][256:], 1, rtol=1e-5)
    for moment in moments(state):
        assert np.all(jnp.isnan(moment.dequantize()[:256]))
        assert np.all(jnp.isfinite(moment.dequantize()[256:]))


def test_files(tmp_path):
    params = {"w": normal(64, 64), "v": normal(64)}
    optimiser = optax.chain(adamw8bit(1e-2), adamw4bit(1e-2), muon8bit(1e-2))
    _, state = optimiser.update(params, optimiser.init(params), params)
    eqq.save(tmp_path / "state.safetensors", state)
    loaded = eqq.load(tmp_path / "state.safetensors", like=optimiser.init(params))
    assert trees_equal(loaded, state)


# Such as one of smaller blocks: a state keeps the blocks that it was saved with.
def test_files_of_another_format(tmp_path):
    params = {"w": normal(64, 64)}
    optimiser = scale_by_adam8bit()
    _, state = optimiser.update(params, optimiser.init(params))
    other = eqq.Dynamic8(64, dithered=True)
    mu = {"w": eqq.quantize(state.mu["w"].dequantize(), other)}
    eqq.save(tmp_path / "state.safetensors", state._replace(mu=mu))
    loaded = eqq.load(tmp_path / "state.safetensors", like=optimiser.init(params))
    assert trees_equal(loaded.mu, mu)
    updates, after = optimiser.update(params, loaded)
    assert (after.mu["w"].format, after.nu["w"].format) == (other, state.nu["w"].format)
    assert np.mean(np.abs(updates["w"] - np.sign(params["w"]))) < 0.1


steps = 2000


@eqx.filter_jit
def curve(optimiser, seed):
    """The losses of a small network that learns what another one computes."""
    teacher = eqx.nn.MLP(16, 4, 64, 2, activation=jnp.tanh, key=jr.key(100))
    make = lambda key: eqx.nn.MLP(16, 4, 64, 2, activation=jnp.tanh, key=key)
    params, static = eqx.partition(make(jr.fold_in(jr.key(0), seed)), eqx.is_array)

    def step(carry, i):
        params, state = carry
        x = jr.normal(jr.fold_in(jr.fold_in(jr.key(1), seed), i), (32, 16))

        def loss(params):
            y = jax.vmap(eqx.combine(params, static))(x)
            return jnp.mean((y - 5 * jax.vmap(teacher)(x)) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimiser.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    carry = params, optimiser.init(params)
    _, losses = jax.lax.scan(step, carry, jnp.arange(steps))
    return jnp.mean(losses.reshape(20, -1), axis=-1)


# In no part they differ, on average, by what one seed does from the next.
@pytest.mark.thorough
@pytest.mark.optimized
@pytest.mark.parametrize(
    "ours, theirs, rate",
    [
        (adamw8bit, optax.adamw, 3e-3),
        (adamw4bit, optax.adamw, 3e-3),
        (lion8bit, optax.lion, 1e-3),
        (muon8bit, optax.contrib.muon, 1e-2),
    ],
)
def test_curves(ours, theirs, rate):
    rate = optax.cosine_decay_schedule(rate, steps)
    expected, found = (
        np.log([curve(optimiser, jnp.asarray(seed)) for seed in range(3)])
        for optimiser in (theirs(rate), ours(rate, min_size=256))
    )
    assert np.all(expected[:, -1] < expected[:, 0] - 2)
    noise = np.mean(np.std(expected, axis=0, ddof=1))
    difference = np.mean(found - expected, axis=0)
    assert np.max(np.abs(difference)) < 2 * noise


def test_optax_is_needed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for make in (adamw8bit, ema8bit, lion8bit, muon8bit):
        with pytest.raises(ModuleNotFoundError, match=r"pip install eqquant\[train\]"):
            make(1e-3)


@pytest.mark.examples(1)
@pytest.mark.parametrize("size", (8, 8192))
@pytest.mark.parametrize(
    "make", (adamw8bit, lion8bit, ft.partial(muon8bit, nesterov=False))
)
def test_complex_parameters(make, size):
    # Moments are real: the imaginary parts of gradients would be dropped.
    optimizer = make(0.1, weight_decay=0.0)
    real, imaginary = normal(2, size)
    params = jax.lax.complex(real, imaginary)
    with raises(ValueError, "params", "complex64", "split_real_and_imaginary"):
        optimizer.init(params)
    split = optax.contrib.split_real_and_imaginary(optimizer)
    update, _ = split.update(params, split.init(params), params)
    expected = -0.1 * (jnp.sign(real) + 1j * jnp.sign(imaginary))
    assert jnp.allclose(update, expected, rtol=1e-2)


@pytest.mark.examples(1)
@pytest.mark.parametrize("make", (adamw8bit, lion8bit))
def test_parameters_that_are_no_arrays(make):
    optimizer = make(0.1)
    params = {"scale": 2.0, "w": normal(64, 65)}
    params = optax.apply_updates(
        params, optimizer.update(params, optimizer.init(params), params)[0]
    )
    assert jnp.allclose(params["scale"], 1.9, atol=1e-3)
    with raises(ValueError, "params", "is_inexact_array"):
        optimizer.init(eqx.nn.MLP(2, 2, 2, 1, key=jr.key(0)))
