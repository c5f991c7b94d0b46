"""What it costs: the time and the temporary memory of `calibrate`, of those of what it
calls, and the time of `GPTQ`."""

import time

import equinox as eqx
import jax
import jax.extend.backend
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqquant as eqq
from eqquant.demo import full


def costs():
    fn, model, windows = language_model()
    forward = eqx.filter_jit(fn)
    jax.block_until_ready(forward(model, windows))
    plain = np.median([_seconds(forward, model, windows) for _ in range(7)])
    starts, number = [], 8

    def batches():
        for _ in range(number):
            yield windows
            starts.append(time.perf_counter())

    # (By the first of these times, the program is compiled, and about to run.)
    eqq.calibrate(fn, model, batches())
    ours = _since(starts[0]) / number
    yield "time of calibrating, of that of the call", ours / plain, 3
    what = "memory above the call's, of the Grams and one more"
    yield what, memory_above_the_call(fn, model, windows), 1
    w = jr.normal(jr.key(1), (4096, 4096))
    x = jr.normal(jr.key(2), (8192, 4096)) * jnp.linspace(0.1, 2, 4096)
    gram = x.T @ x
    seconds = _seconds(eqq.GPTQ().solve, w, eqq.Int4(64), gram)
    yield "seconds of GPTQ of 4096 x 4096, compiling included", seconds, 60


def memory_above_the_call(fn, model, batch):
    """In units of all Gram matrices and the largest of them once more."""
    arrays, static = eqx.partition(model, eqx.is_array)
    whole = jax.jit(lambda arrays, x: fn(eqx.combine(arrays, static), x))
    before = _memory(whole.lower(arrays, batch).compile().memory_analysis())
    live = jax.extend.backend.get_backend().live_executables
    others, after = live(), []

    def batches():
        yield batch
        new = [program for program in live() if program not in others]
        after.extend(_memory(each.get_compiled_memory_stats()) for each in new)

    stats = eqq.calibrate(fn, model, batches())
    largest = max(stats[path].value.nbytes for path in stats)
    return (max(after) - before) / (stats.nbytes + largest)


def language_model():
    """A function, a model, and a batch."""
    # (How long it takes and how much memory does not depend on the weights.)
    windows = jr.randint(jr.key(0), (64, full.window + 1), 0, 256).astype(jnp.uint8)
    fn = lambda model, windows: jax.vmap(model)(windows[:, :-1])
    return fn, full.untrained(), windows


def _memory(found):
    return (
        found.argument_size_in_bytes
        + found.temp_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
    )


def _since(start):
    return time.perf_counter() - start


def _seconds(run, *operands):
    start = time.perf_counter()
    jax.block_until_ready(run(*operands))
    return _since(start)
