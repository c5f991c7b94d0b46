"""What training in fewer bits costs and saves:

    python -m tests.train.compute speed     # seconds of a step; 50 million parameters
    python -m tests.train.compute losses    # nats on held-out text, over some seeds

`notebooks/fewer_bits.md` has the figures. Nothing else should run while `speed` does.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

import eqquant as eqq
from eqquant.demo import LanguageModel, standard_library, windows
from eqquant.train import Delayed, Stochastic, tree_compute, update_delayed


e4m3, e5m2 = (eqq.FP8(dtype, scale="tensor") for dtype in ("e4m3", "e5m2"))

# The arguments of `tree_compute` after the format forward.
ways = {
    "float32": None,
    "int8, backward in float32": ("int8", None),
    "int8, backward in bfloat16": ("int8", jnp.bfloat16),
    "int8, backward at random": ("int8", Stochastic("int8")),
    "int8, backward to the nearest": ("int8", "int8"),
    "int8, inputs' gradients to the nearest": ("int8", ("int8", jnp.bfloat16)),
    "int8, weights' gradients to the nearest": ("int8", (jnp.bfloat16, "int8")),
    "fp8, backward in bfloat16": (eqq.FP8(), jnp.bfloat16),
    "fp8, backward in e5m2": (eqq.FP8(), eqq.FP8("e5m2")),
    "fp8, one scale, backward in e5m2": (e4m3, e5m2),
    "fp8, one delayed scale, backward in float32": (Delayed(e4m3), None),
    "fp8, one delayed scale, backward in e5m2": (Delayed(e4m3), Delayed(e5m2)),
}
adam = optax.chain(optax.scale_by_adam(b2=0.95), optax.add_decayed_weights(0.1))


def prepared(name, model):
    if ways[name] is None:
        return model
    forward, backward = ways[name]
    return tree_compute(model, forward=forward, backward=backward)


def loss(model, rows):
    arrays, static = eqx.partition(model.blocks, eqx.is_array)

    def block(x, arrays):
        layer = eqx.combine(arrays, static)
        return jax.vmap(lambda x: layer(x, jnp.asarray(0), None)[0])(x), None

    x = jax.vmap(jax.vmap(model.embedding))(rows[:, :-1])
    x, _ = jax.lax.scan(block, x, arrays)
    logits = jax.vmap(jax.vmap(model.head))(jax.vmap(jax.vmap(model.norm))(x))
    labels = rows[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit(donate="all-except-first")
def step(batch, model, state):
    rows, rate = batch
    value, gradients = eqx.filter_value_and_grad(loss)(model, rows)
    model, gradients = update_delayed(model, gradients)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, state = adam.update(gradients, state, params)
    updates = jax.tree.map(lambda u: -rate * u, updates)
    return eqx.apply_updates(model, updates), state, value


def started(name, **sizes):
    model = prepared(name, LanguageModel(**sizes))
    return model, adam.init(eqx.filter(model, eqx.is_inexact_array))


def speed(repeats, width=768, depth=7, heads=12):
    """The shortest of some steps of each way, which take turns."""
    names = [*ways][0], [*ways][1], [*ways][3]
    rows = jr.randint(jr.key(1), (8, 257), 0, 256).astype(jnp.uint8)
    batch = rows, jnp.float32(1e-3)
    running = {}
    for name in names:
        sizes = dict(width=width, depth=depth, heads=heads)
        running[name] = started(name, **sizes, key=jr.key(0))
    model, _ = running[names[0]]
    number = sum(a.size for a in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    print(f"{number / 1e6:.1f} million parameters, {rows[:, 1:].size} tokens a step")
    seconds = {name: [] for name in names}
    for _ in range(1 + repeats):
        for name in names:
            start = time.perf_counter()
            *running[name], value = step(batch, *running[name])
            jax.block_until_ready((running[name], value))
            seconds[name].append(time.perf_counter() - start)
    first = min(seconds[names[0]][1:])
    for name in names:
        best = min(seconds[name][1:])
        print(f"{name:44} {best:6.2f} s a step   {first / best:.2f} times as fast")


def losses(steps, seeds, names, width=128, depth=2, heads=4):
    """The loss after the training, above that of float32 with the same seed."""
    text = standard_library()
    train_text = jnp.asarray(text.train)
    held_out = jnp.asarray(windows(text.held_out, 256, 129))

    def train(name, seed):
        sizes = dict(width=width, depth=depth, heads=heads)
        model, state = started(name, **sizes, key=jr.key(seed))
        for count in range(steps):
            key = jr.fold_in(jr.key(seed + 1000), count)
            starts = jr.randint(key, (8, 1), 0, train_text.size - 128)
            rows = train_text[starts + jnp.arange(129)]
            done = (count + 1) / (steps + 1)
            rate = 4e-3 * min(10 * done, (1 + np.cos(np.pi * done)) / 2)
            model, state, _ = step((rows, jnp.float32(rate)), model, state)
        return float(eqx.filter_jit(loss)(model, held_out))

    base = [train("float32", seed) for seed in seeds]
    print(f"{'float32':44}", *[f"{value:7.4f}" for value in base], flush=True)
    for name in names:
        over = [train(name, seed) - value for seed, value in zip(seeds, base)]
        text = [f"{value:+7.4f}" for value in over]
        print(f"{name:44}", *text, f"  mean {np.mean(over):+.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("speed", "losses"))
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each step, for speed"
    )
    parser.add_argument("--steps", type=int, default=1500, help="for losses")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=[*ways][1:], default=[*ways][1:])
    given = parser.parse_args()
    if given.what == "speed":
        speed(given.repeats)
    else:
        losses(given.steps, given.seeds, given.ways)
