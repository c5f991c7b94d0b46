import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqquant.train import adamw8bit, lion8bit, scale_by_adam8bit, scale_by_lion8bit

from ..helpers import normal, trees_equal


all_optimizers = pytest.mark.parametrize(
    "make", (adamw8bit, lion8bit, scale_by_adam8bit, scale_by_lion8bit)
)
params = {"w": normal(64, 96), "v": normal(7)}


@pytest.fixture(autouse=True)
def standard_promotion():
    # Optax multiplies the number of steps, an integer, with decay rates.
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def compiled():
    """The names of events, one for each program that XLA compiles."""
    events = []

    def listen(name, _, **kwargs):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def rate(make):
    if make in (scale_by_adam8bit, scale_by_lion8bit):
        return {}
    return {"learning_rate": 1e-2}


def steps(optimizer, number, state=None):
    state = optimizer.init(params) if state is None else state
    for _ in range(number):
        updates, state = optimizer.update(params, state, params)
    return updates, state


@pytest.mark.examples(2)
@all_optimizers
def test_hyperparameters_are_no_reason_to_compile(make, compiled):
    inject = optax.inject_hyperparams(make)
    decay = optax.linear_schedule(0.9, 0.5, 10)
    for options in ({}, {"b1": decay}, {"b2": decay}):
        optimizer = inject(**rate(make), **options)
        _, state = steps(optimizer, 1)
        if options == {}:
            state.hyperparams["b1"] = jnp.asarray(0.7)
            _, state = steps(optimizer, 1, state)
        compiled.clear()
        steps(optimizer, 2, state)
        assert compiled == []


@all_optimizers
def test_others_of_the_same_kind_are_compiled_once(make, compiled):
    steps(make(**rate(make), min_size=100), 2)
    compiled.clear()
    for b1 in (0.8, 0.7):
        steps(make(**rate(make), b1=b1, min_size=100), 2)
    assert compiled == []


# And they are what they would be as constants.
@all_optimizers
def test_injected(make):
    options = dict(min_size=100, b1=0.5, b2=0.75, **rate(make))
    expected, state = steps(make(**options), 3)
    for static_args in ((), ("block_size", "min_size")):
        inject = optax.inject_hyperparams(make, static_args)
        found, injected = steps(inject(**options), 3)
        for x, y in zip(found.values(), expected.values(), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
        assert trees_equal(injected.inner_state, state)


def test_sizes_are_known_before():
    optimizer = optax.inject_hyperparams(adamw8bit)(1e-2)
    hyperparams = optimizer.init(params).hyperparams
    make = lambda block_size: adamw8bit(1e-2, block_size=block_size).init(params)
    with pytest.raises(TypeError, match="`block_size`.*`static_args`"):
        jax.jit(make)(hyperparams["block_size"])
