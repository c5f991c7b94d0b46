import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqquant.train import (
    adamw4bit,
    adamw8bit,
    ema8bit,
    lion8bit,
    muon8bit,
    scale_by_adam8bit,
    scale_by_lion8bit,
)

from ..helpers import normal, trees_equal


# With the names of their decay rates.
decays = {
    adamw4bit: ("b1", "b2"),
    adamw8bit: ("b1", "b2"),
    lion8bit: ("b1", "b2"),
    muon8bit: ("beta", "adam_b1", "adam_b2"),
    scale_by_adam8bit: ("b1", "b2"),
    scale_by_lion8bit: ("b1", "b2"),
    ema8bit: ("decay",),
}
all_optimizers = pytest.mark.parametrize("make", decays)
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


def required(make):
    if make is ema8bit:
        return {"decay": 0.9}
    takes_rate = make in (adamw4bit, adamw8bit, lion8bit, muon8bit)
    return {"learning_rate": 1e-2} if takes_rate else {}


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
    for options in ({}, *({name: decay} for name in decays[make])):
        optimizer = inject(**(required(make) | options))
        _, state = steps(optimizer, 1)
        if options == {}:
            state.hyperparams[decays[make][0]] = jnp.asarray(0.7)
            _, state = steps(optimizer, 1, state)
        compiled.clear()
        steps(optimizer, 2, state)
        assert compiled == []


@pytest.mark.examples(4)
@all_optimizers
def test_others_of_the_same_kind_are_compiled_once(make, compiled):
    options = required(make) | dict(min_size=100)
    steps(make(**options), 2)
    compiled.clear()
    for decay in (0.8, 0.7):
        steps(make(**(options | {decays[make][0]: decay})), 2)
    assert compiled == []


# And they are what they would be as constants.
@pytest.mark.examples(3)
@all_optimizers
def test_injected(make):
    rates = dict(zip(decays[make], (0.5, 0.75, 0.5)))
    options = required(make) | rates | dict(min_size=100)
    expected, state = steps(make(**options), 3)
    sizes = {"block_size", "min_size", "ns_steps"} & {
        *inspect.signature(make).parameters
    }
    for static_args in ((), sizes):
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
