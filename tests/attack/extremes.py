import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqquant as eqq

from .case import Case


_t = eqq.train
# With decays by which a momentum ends within 400 steps; and optax's.
_pairs = {
    "adamw8bit": (
        ft.partial(_t.adamw8bit, 1e-3, weight_decay=0.0),
        optax.adamw(1e-3, weight_decay=0.0),
    ),
    "adamw4bit": (
        ft.partial(_t.adamw4bit, 1e-3, weight_decay=0.0),
        optax.adamw(1e-3, weight_decay=0.0),
    ),
    "lion8bit": (
        ft.partial(_t.lion8bit, 1e-3, b2=0.9, weight_decay=0.0),
        optax.lion(1e-3, b2=0.9, weight_decay=0.0),
    ),
    "ema8bit": (ft.partial(_t.ema8bit, 0.9), optax.ema(0.9)),
}


def extremes(case: Case) -> None:
    """Optimizers, with gradients of any size, some of which end: what is finite by
    optax is finite, and what has no gradient comes to rest."""
    name = case.pick([*_pairs])
    make, theirs = _pairs[name]
    ours = make(min_size=0, block_size=case.pick((32, 128, 256)))
    size, noise = case.pick((256, 500)), float(case.chance(0.7))
    largest = float(10 ** case.rng.uniform(-12, 38))
    scale = largest * 10 ** case.rng.uniform(-case.integer(0, 8), 0, size)
    scale *= case.rng.choice([-1, 1], size)
    ends = case.rng.random(size) < case.pick((0.05, 0.5, 0.95))
    # The largest of each block has a gradient in all steps.
    ends[::32], scale[::32] = False, largest
    end = case.integer(1, 20)
    scale = jnp.asarray(scale, jnp.float32)

    def run(optimizer):
        def step(carry, i):
            w, state = carry
            key = jax.random.fold_in(jax.random.key(case.number), i)
            g = scale * (1 + noise * jax.random.uniform(key, (size,)))
            g = jnp.where(ends & (i >= end), 0.0, g)
            updates, state = optimizer.update(g, state, w)
            return (optax.apply_updates(w, updates), state), updates

        w = jnp.zeros(size)
        carry = w, optimizer.init(w)
        return jax.jit(lambda: jax.lax.scan(step, carry, jnp.arange(600))[1])()

    with jax.numpy_dtype_promotion("standard"):
        found, expected = np.asarray(run(ours)), np.asarray(run(theirs))
    names = dict(kind="extremes", optimizer=name)
    about = f"{name}: gradients of {largest:.0e}, some until {end}"
    finite = np.all(np.isfinite(found) | ~np.isfinite(expected))
    case.expect(f"{about}: finite", finite, **names)
    rests = np.all(found[-50:, ends] == 0)
    case.expect(f"{about}: comes to rest", rests, **names)
