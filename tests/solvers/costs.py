"""What it costs: the time and the temporary memory of `calibrate`, of those of what it
calls, and the time of `GPTQ`."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqquant as eqq
from eqquant._trace._calibrate import _compiled
from eqquant._trace._calls import Calls
from eqquant.demo import _trained


def costs():
    # (How long it takes and how much memory does not depend on the weights.)
    model = _trained.full.untrained()
    windows = jr.randint(jr.key(0), (64, _trained.full.window + 1), 0, 256)
    windows = windows.astype(jnp.uint8)
    fn = lambda model, windows: jax.vmap(model)(windows[:, :-1])
    calls = Calls(fn, model, _compiled)
    step, leaves = calls(0, windows)
    shapes = calls.shapes(8192)
    zeros = lambda: {slot: calls.zeros(shape) for slot, shape in shapes.items()}
    forward = eqx.filter_jit(fn)

    def calibrate():
        return step(zeros(), calls.leaves, leaves)

    plain, ours = lambda: forward(model, windows), calibrate
    times = [_seconds(run) for run in (plain, ours)]
    yield "time of calibrating, of that of the call", times[1] / times[0], 3
    arrays, static = eqx.partition(model, eqx.is_array)
    whole = jax.jit(lambda arrays, x: fn(eqx.combine(arrays, static), x))
    before = _memory(whole.lower(arrays, windows))
    after = _memory(step.lower(zeros(), calls.leaves, leaves))
    sums = sum(a.nbytes for each in zeros().values() for a in each)
    largest = max(each.value.nbytes for each in zeros().values())
    yield (
        f"memory above the call's, of the Grams ({sums / 1e6:.1f} MB) and one more",
        (after - before) / (sums + largest),
        1,
    )
    w = jr.normal(jr.key(1), (4096, 4096))
    x = jr.normal(jr.key(2), (8192, 4096)) * jnp.linspace(0.1, 2, 4096)
    gram = x.T @ x
    run = lambda: eqq.GPTQ().solve(w, eqq.Int4(64), gram)
    start = time.perf_counter()
    jax.block_until_ready(run())
    yield "seconds of GPTQ of 4096 x 4096, compiling included", _since(start), 60


def _memory(lowered):
    found = lowered.compile().memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.temp_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
    )


def _since(start):
    return time.perf_counter() - start


def _seconds(run):
    jax.block_until_ready(run())
    found = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(_since(start))
    return np.median(found)
