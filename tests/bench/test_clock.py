import time

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.bench._candidate import dense, quantized, rotating
from eqquant.bench._clock import Clock
from eqquant.bench._formats import as_quantization
from eqquant.bench._memory_rate import default_cycle, last_level_cache, number_of_copies


def test_calls_take_turns():
    called = []
    calls = [lambda: called.append("a"), lambda: called.append("b")]
    spent = []
    times = Clock(budget=0, min_rounds=4, settle=0, turn=0)(calls, spent.append)
    # Once in each turn before that which counts.
    assert called == ["a", "a", "b", "b"] * 4
    assert [len(t.seconds) for t in times] == [4, 4]
    assert [t.baseline for t in times] == [times[0].seconds] * 2
    assert sum(spent) == 0


def test_what_is_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    calls = [lambda: time.sleep(0.25), lambda: time.sleep(0.5)]
    spent = []
    clock = Clock(budget=14, min_rounds=1, rest=1.0, settle=1.0, turn=0.6)
    first, second = clock(calls, spent.append)
    # A round takes 1 + 1 + 0.75 seconds, and then 1 + 1 + 1.
    assert first.seconds == (0.25,) * 3
    assert second.seconds == (0.5,) * 3
    assert second.ratio == second.ratio_p10 == 0.5
    assert spent == pytest.approx([5.75, 5.75, 2.5])


def test_budget_and_rounds_are_both_kept():
    rounds = []
    call = lambda: rounds.append(time.sleep(0.002))
    Clock(budget=0.1, min_rounds=1)([call], lambda seconds: None)
    assert len(rounds) > 5


@pytest.mark.parametrize("name", ["float32", "nf4"])
def test_rotation(name):
    w = np.random.default_rng(0).standard_normal((32, 64), np.float32)
    candidate = (
        dense(jnp.float32, w)
        if name == "float32"
        else quantized(as_quantization(name), w)
    )
    weights = candidate.rotation(cycle=3 * candidate.nbytes - 1)
    assert len(weights) == 3
    arrays = [w if name == "float32" else w.stored["codes"] for w in weights]
    assert len({a.unsafe_buffer_pointer() for a in arrays}) == 3
    for a in arrays:
        assert np.array_equal(a, arrays[0])
    used = []
    call = rotating(lambda x, weight: used.append(weight), None, weights)
    for _ in range(5):
        call()
    assert [id(w) for w in used] == [id(weights[i]) for i in (0, 1, 2, 0, 1)]


def test_rotation_exceeds_the_caches():
    nbytes = eqq.quantize(jnp.ones((1024, 4096))).nbytes
    cycle = default_cycle()
    assert cycle >= 256 << 20
    assert cycle >= 4 * (last_level_cache() or 0)
    assert nbytes * number_of_copies(nbytes, cycle) >= cycle
    assert number_of_copies(2 * cycle, cycle) == 1
