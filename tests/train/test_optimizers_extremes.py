"""Parameters whose gradients end, and gradients whose squares overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqquant.train import adamw4bit, adamw8bit, ema8bit, lion8bit, muon8bit

from ..helpers import normal


@pytest.fixture(autouse=True)
def standard_promotion():
    # Optax multiplies the number of steps, an integer, with decay rates.
    with jax.numpy_dtype_promotion("standard"):
        yield


def sgd(momentum):
    return optax.chain(momentum, optax.sgd(1e-3))


def movements(optimizer, first, noise):
    """How far parameters have moved after 500, 1000 and 3000 steps, whose gradients are
    zero but in the first. Those of others, in the same blocks, never end."""
    ends = np.arange(1024) % 4 == 0
    first = first * np.random.default_rng(0).uniform(0.9, 1.1, 1024)

    def step(carry, i):
        params, state = carry
        others = 1 + noise * jax.random.normal(jax.random.fold_in(jax.random.key(0), i))
        g = jnp.where(ends, jnp.where(i == 0, first, 0.0), others)
        updates, state = optimizer.update(g.astype(jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    params = jnp.zeros(1024)
    carry = params, optimizer.init(params)
    run = jax.jit(lambda: jax.lax.scan(step, carry, jnp.arange(3000))[1])
    return np.abs(np.asarray(run()))[[499, 999, 2999]][:, ends]


# As by optax, and only until the momentum has ended.
@pytest.mark.thorough
@pytest.mark.parametrize("first, noise", [(0.1, 1.0), (0.001, 0.0)])
@pytest.mark.parametrize(
    "ours, theirs",
    [
        (
            adamw8bit(1e-3, weight_decay=0, min_size=0),
            optax.adamw(1e-3, weight_decay=0),
        ),
        (
            adamw4bit(1e-3, weight_decay=0, min_size=0),
            optax.adamw(1e-3, weight_decay=0),
        ),
        (sgd(ema8bit(0.9, min_size=0)), sgd(optax.ema(0.9))),
    ],
    ids=("adamw8bit", "adamw4bit", "ema8bit"),
)
def test_gradients_that_end(ours, theirs, first, noise):
    early, later, last = movements(ours, first, noise)
    expected = movements(theirs, first, noise)[-1]
    # (A momentum of 4 bits may become 1/49 of the largest, rather than zero.)
    assert np.mean(last) < 1.5 * np.mean(expected)
    assert np.max(last) < 4 * np.max(expected) + 1e-5
    np.testing.assert_array_equal(later, last)
    assert np.mean(early == last) > 0.99


# That of Lion moves a parameter by the learning rate as long as its momentum has a
# sign: in float32, for 9000 steps.
@pytest.mark.examples(1)
@pytest.mark.parametrize("noise", (0.0, 1.0))
def test_momentum_of_lion_ends(noise):
    optimizer = lion8bit(1e-3, weight_decay=0, min_size=0)
    _, later, last = movements(optimizer, 0.001, noise)
    np.testing.assert_array_equal(later, last)


# The largest gradients whose moments float32 holds, and those whose squares it does
# not: the updates of all others are finite, as by optax.
@pytest.mark.parametrize("largest", (1e15, 2e19, 1e20, -3.4e38))
@pytest.mark.parametrize(
    "ours, theirs",
    [
        (adamw8bit(1e-3), optax.adamw(1e-3)),
        (adamw8bit(1e-3, 0.0, nesterov=True), optax.adamw(1e-3, 0.0, nesterov=True)),
        (adamw4bit(1e-3), optax.adamw(1e-3)),
        (lion8bit(1e-3, 0.0, 0.0), optax.lion(1e-3, 0.0, 0.0)),
        (ema8bit(0.0), optax.ema(0.0)),
        (muon8bit(1e-3, beta=0.5), optax.contrib.muon(1e-3, beta=0.5)),
    ],
    ids=("adamw8bit", "nesterov", "adamw4bit", "lion8bit", "ema8bit", "muon8bit"),
)
def test_gradients_whose_squares_overflow(ours, theirs, largest):
    params, g = jnp.ones((64, 128)), normal(64, 128)
    extreme = g.at[0, 0].set(largest)

    def run(optimizer):
        state, found = optimizer.init(params), []
        for one in (extreme, g, g):
            updates, state = jax.jit(optimizer.update)(one, state, params)
            found.append(updates)
        return np.asarray(found, np.float64)

    found, expected = run(ours), run(theirs)
    assert np.all(np.isfinite(found) | ~np.isfinite(expected))
    if np.all(np.isfinite(expected)):
        assert np.max(np.abs(found)) <= 40 * np.max(np.abs(expected))


# What is infinite is not hidden.
def test_infinite_gradients():
    params = jnp.ones(8192)
    for optimizer in (adamw8bit(1e-3), adamw4bit(1e-3)):
        g = jnp.ones(8192).at[3].set(jnp.inf)
        updates, state = optimizer.update(g, optimizer.init(params), params)
        assert not np.isfinite(updates[3])
        updates, _ = optimizer.update(jnp.ones(8192), state, params)
        assert np.isnan(updates[3]) and np.isfinite(updates[256:]).all()


# Steps of a loop are those of a scan, to the bit.
@pytest.mark.examples(1)
@pytest.mark.parametrize("make", (lion8bit, adamw8bit, adamw4bit))
def test_scan_is_loop(make):
    rosenbrock = lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
    optimizer = make(1e-2, min_size=0, block_size=16)

    def step(carry, _=None):
        x, state = carry
        updates, state = optimizer.update(jax.grad(rosenbrock)(x), state, x)
        return (optax.apply_updates(x, updates), state), None

    first = jnp.zeros(2), optimizer.init(jnp.zeros(2))
    found, _ = jax.jit(lambda: jax.lax.scan(step, first, None, 200))()
    expected, one = first, jax.jit(step)
    for _ in range(200):
        expected, _ = one(expected)
    np.testing.assert_array_equal(found[0], expected[0])
