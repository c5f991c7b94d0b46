"""The losses of a small language model with moments of AdamW in 8 and 4 bits, next to
those in float32:

    python -m tests.train.optimizer_losses    # nats on held-out text, over some seeds

`notebooks/optimizers.md` has the figures, and those of `tests.train.regression`, where
gradients have no noise.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from eqquant.demo import LanguageModel, standard_library, windows
from eqquant.train import adamw4bit, adamw8bit

from .compute import loss


def trained(make, steps):
    """A compiled function from a seed and a text to a model."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps)
    optimizer = make(rate, b2=0.95, weight_decay=0.1)

    @eqx.filter_jit
    def run(seed, text):
        model = LanguageModel(width=128, depth=2, heads=4, key=jr.key(seed))
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def step(carry, count):
            params, state = carry
            key = jr.fold_in(jr.key(seed + 1000), count)
            starts = jr.randint(key, (8, 1), 0, text.size - 128)
            rows = text[starts + jnp.arange(129)]
            gradients = jax.grad(lambda p: loss(eqx.combine(p, static), rows))(params)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, carry, jnp.arange(steps))
        return eqx.combine(params, static)

    return run


def main(steps, seeds):
    text = standard_library()
    held_out = jnp.asarray(windows(text.held_out, 256, 129))
    base = None
    for make in (optax.adamw, adamw8bit, adamw4bit):
        run = trained(make, steps)
        models = [run(jnp.asarray(seed), jnp.asarray(text.train)) for seed in seeds]
        found = np.array([eqx.filter_jit(loss)(model, held_out) for model in models])
        base = found if base is None else base
        each = " ".join(f"{value:.4f}" for value in found)
        over = np.mean(found - base)
        print(f"{make.__name__:10} {each}   mean over float32 {over:+.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    main(given.steps, given.seeds)
