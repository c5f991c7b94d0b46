"""What it costs: the time and the temporary memory of `calibrate`, of those of what it
calls, and the time of `GPTQ`."""

import functools as ft
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
    fn, calls, given = _calibration()
    step, leaves = calls(0, given[1])
    forward, sums = eqx.filter_jit(fn), ft.partial(_zeros, calls)
    plain, ours = lambda: forward(*given), lambda: step(sums(), calls.leaves, leaves)
    times = [_seconds(run) for run in (plain, ours)]
    yield "time of calibrating, of that of the call", times[1] / times[0], 3
    what = "memory above the call's, of the Grams and one more"
    yield what, memory_above_the_call(), 1
    w = jr.normal(jr.key(1), (4096, 4096))
    x = jr.normal(jr.key(2), (8192, 4096)) * jnp.linspace(0.1, 2, 4096)
    gram = x.T @ x
    run = lambda: eqq.GPTQ().solve(w, eqq.Int4(64), gram)
    start = time.perf_counter()
    jax.block_until_ready(run())
    yield "seconds of GPTQ of 4096 x 4096, compiling included", _since(start), 60


def memory_above_the_call():
    """In units of all Gram matrices and the largest of them once more."""
    fn, calls, (model, windows) = _calibration()
    arrays, static = eqx.partition(model, eqx.is_array)
    whole = jax.jit(lambda arrays, x: fn(eqx.combine(arrays, static), x))
    before = _memory(whole.lower(arrays, windows))
    step, leaves = calls(0, windows)
    sums = _zeros(calls)
    after = _memory(step.lower(sums, calls.leaves, leaves))
    sizes = [sum(a.nbytes for a in each) for each in sums.values()]
    return (after - before) / (sum(sizes) + max(sizes))


def _calibration():
    # (How long it takes and how much memory does not depend on the weights.)
    model = _trained.full.untrained()
    windows = jr.randint(jr.key(0), (64, _trained.full.window + 1), 0, 256)
    windows = windows.astype(jnp.uint8)
    fn = lambda model, windows: jax.vmap(model)(windows[:, :-1])
    return fn, Calls(fn, model, _compiled), (model, windows)


def _zeros(calls):
    return {slot: calls.zeros(shape) for slot, shape in calls.shapes(8192).items()}


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
