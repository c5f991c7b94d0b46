"""What the model of `eqquant demo --calibrate` loses in nats per byte: medians over
three sets of data to calibrate with. And the ratio of its loss in formats that are
allotted within a budget to its loss in one format of at least as many bits."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import eqquant as eqq
from eqquant.demo import _text, _trained, run_calibrated
from eqquant.demo._bar import Bar
from eqquant.demo._table import bits_of
from eqquant.demo._train import mean_loss


targets = {
    "Int4()": 0.0027,
    "Int4(symmetric=False)": 0.0027,
    "NF4()": 0.0028,
    "Int(3)": 0.0085,
    'Int(3, offset="minimum")': 0.0085,
    'Int(2, offset="minimum")': 0.0380,
    "Ternary(64)": 0.1050,
}
_half = jnp.bfloat16
# By budget: formats of as many bits, and the next larger one.
uniform = {
    3.0: (
        eqq.Int(2, 64, "minimum"),
        eqq.Int(2, 32, "minimum", scale_dtype=_half),
        eqq.Int(3, 128, scale_dtype=_half),
    ),
    4.0: (
        eqq.Int(3, 64, "minimum"),
        eqq.Int(3, 32, "minimum", scale_dtype=_half),
        eqq.Int4(128, scale_dtype=_half),
    ),
}


def losses():
    console = Console(stderr=True)
    rows = run_calibrated(out=None, console=console, seeds=3)
    found = {(row.format, row.method): row for row in rows}
    for name, most in targets.items():
        yield f"{name}, GPTQ()", found[name, "GPTQ()"].change, most
    lost = uniform_losses(console)
    for bits, each in uniform.items():
        chosen = found[f"{bits} bits", "formats by loss"]
        for format in each:
            used, change = lost[format]
            assert used >= chosen.bits_per_weight
            what = f"{bits} bits allotted, over {format} ({used:g} bits)"
            yield what, chosen.change / change, 0.75


def uniform_losses(console, formats=None, seeds=3):
    """The bits and the loss of each format, for the model and the data of the demo."""
    recipe, text = _trained.full, _text.standard_library()
    bar = Bar(1, console)
    dense = _trained.trained(recipe, text, fresh=False, console=console, bar=bar)
    length = recipe.window + 1
    held_out = jnp.asarray(_text.windows(text.held_out, 512, length))
    random = np.random.default_rng(0)
    starts = random.integers(0, text.train.size - length, (seeds, 64, 1))
    sets = text.train[starts + np.arange(length)]
    apply = lambda model, windows: jax.vmap(model)(windows[:, :-1])
    batches = [list(jnp.split(jnp.asarray(x), 4)) for x in sets]
    stats = [eqq.calibrate(apply, dense, each) for each in batches]
    loss = lambda model: mean_loss(model, held_out, batch=64)
    base, found = loss(dense), {}
    for format in formats or [f for each in uniform.values() for f in each]:
        jax.clear_caches()  # Linux limits the memory maps of a process.
        models = [eqq.tree_quantize(dense, format, stats=each) for each in stats]
        change = statistics.median(map(loss, models)) - base
        found[format] = bits_of(models[0]), change
    return found
