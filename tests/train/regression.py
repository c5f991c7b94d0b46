"""The losses of optimizers with moments in 8 and 4 bits, next to those in float32, on
regressions without noise:

    python -m tests.train.regression                     # an MLP of ReLUs, 20 seeds
    python -m tests.train.regression --activation tanh
    python -m tests.train.regression --optimizer muon    # or adafactor, with momentum

An MLP 64-256-256-64 learns `sin(x @ a)` of 512 points, all of them in each of 400 steps
at a rate of 3e-3 (AdamW) or 1e-2. Each loss is the mean of the last 20; that of the
last step alone is printed, too. Those of AdamW scatter by a factor of two over seeds,
so that medians of ten scatter by a third. The last alone scatters by a factor of ten,
since it may be in the middle of a jump: its medians of five say nothing.

If torch and bitsandbytes are installed, `torch.optim.AdamW` and `AdamW8bit` of
bitsandbytes train from the same parameters.
"""

import argparse
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from eqquant.train import adamw4bit, adamw8bit, ema8bit, muon8bit


steps = 400


def problem(seed, activation):
    key, a_key, model_key = jr.split(jr.key(seed), 3)
    x = jr.normal(key, (512, 64))
    y = jnp.sin(x @ jr.normal(a_key, (64, 64)) / 4)
    model = eqx.nn.MLP(64, 64, 256, 2, getattr(jax.nn, activation), key=model_key)
    return x, y, model


def trained(optimizer, activation):
    """A compiled function from a seed to the mean of the last losses, and the last."""

    def run(seed):
        x, y, model = problem(seed, activation)
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def loss(params):
            return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

        def step(carry, _):
            params, state = carry
            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), value

        carry = params, optimizer.init(params)
        _, losses = jax.lax.scan(step, carry, None, steps)
        return jnp.mean(losses[-20:]), losses[-1]

    return jax.jit(run)


def trained_by_torch(make, activation):
    import torch

    fn = getattr(torch.nn.functional, activation)

    def run(seed):
        x, y, model = problem(seed, activation)
        arrays = [a for layer in model.layers for a in (layer.weight, layer.bias)]
        x, y, *params = (torch.tensor(np.asarray(a)) for a in (x, y, *arrays))
        params = [torch.nn.Parameter(p) for p in params]
        optimizer, losses = make(params), []
        for _ in range(steps):
            optimizer.zero_grad()
            h = x
            for i in range(0, len(params), 2):
                h = h if i == 0 else fn(h)
                h = torch.nn.functional.linear(h, params[i], params[i + 1])
            loss = torch.mean((h - y) ** 2)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return np.mean(losses[-20:]), losses[-1]

    return run


def adamw(rate, block_sizes):
    yield "optax.adamw", optax.adamw(rate)
    for size in block_sizes:
        yield f"adamw8bit, blocks of {size}", adamw8bit(rate, block_size=size)
    yield "adamw4bit", adamw4bit(rate)


def muon(rate, block_sizes):
    def outputs_first(params):
        numbers = optax.contrib.MuonDimensionNumbers(1, 0)
        return jax.tree.map(lambda x: numbers if x.ndim == 2 else None, params)

    options = dict(muon_weight_dimension_numbers=outputs_first)
    yield "optax.contrib.muon", optax.contrib.muon(rate, **options)
    for size in block_sizes:
        optimizer = muon8bit(rate, block_size=size, **options)
        yield f"muon8bit, blocks of {size}", optimizer


def adafactor(rate, block_sizes):
    # Its matrices have 64 columns at least.
    options = dict(min_dim_size_to_factor=64)
    yield "optax.adafactor", optax.adafactor(rate, momentum=0.9, **options)
    for size in block_sizes:
        momentum = ema8bit(0.9, debias=False, block_size=size)
        optimizer = optax.chain(optax.adafactor(rate, **options), momentum)
        yield f"with ema8bit, blocks of {size}", optimizer


# And their rates.
optimizers = {
    "adamw": (adamw, 3e-3),
    "muon": (muon, 1e-2),
    "adafactor": (adafactor, 1e-2),
}


def runs(name, rate, activation, block_sizes):
    """The names of optimizers, and functions from a seed to losses."""
    make, usual = optimizers[name]
    rate = usual if rate is None else rate
    for about, optimizer in make(rate, block_sizes):
        yield about, trained(optimizer, activation)
    packages = ("torch", "bitsandbytes")
    if name == "adamw" and all(importlib.util.find_spec(p) for p in packages):
        import bitsandbytes
        import torch

        options = dict(lr=rate, weight_decay=1e-4)
        for about, make in (
            ("torch.optim.AdamW", torch.optim.AdamW),
            ("bitsandbytes.optim.AdamW8bit", bitsandbytes.optim.AdamW8bit),
        ):
            by = lambda params, make=make: make(params, **options)
            yield about, trained_by_torch(by, activation)


def main(seeds, *how):
    first = None
    print(f"{'':30} median  of optax's  quartiles              last step of optax's")
    for name, run in runs(*how):
        means, lasts = np.array([run(seed) for seed in seeds]).T
        low, median, high = np.quantile(means, (0.25, 0.5, 0.75))
        last = np.median(lasts)
        first = first or (median, last)
        print(
            f"{name:30} {median:.1e}  {median / first[0]:4.2f}    {low:.1e} to "
            f"{high:.1e}    {last:.1e}  {last / first[1]:4.2f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument(
        "--activation", default="relu", choices=("relu", "tanh", "gelu")
    )
    parser.add_argument("--optimizer", default="adamw", choices=optimizers)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[256])
    given = parser.parse_args()
    how = (given.optimizer, given.rate, given.activation, given.block_sizes)
    main(range(given.seeds), *how)
