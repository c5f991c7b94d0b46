"""What a model loses if its weights have formats within a budget of bits."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import eqquant as eqq

from .rows import batches, bits_of, logits, Row


def loss(model, tokens):
    """The mean loss of the next token."""
    logs = jax.nn.log_softmax(logits(model, tokens).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logs[:, :-1], tokens[:, 1:, None], -1))


def rows(dense, predictions, budgets, formats, calibration, held_out):
    """A row for each budget, as it is measured. Each layer has formats of its own,
    chosen from gradients on half of the batches. `seconds` are those of the processor
    that choosing and rounding took, after `calibrate` and the gradients."""
    number = dense.config.depth
    layers = [jtu.tree_map(lambda a: a[i], dense.layers) for i in range(number)]
    model = eqx.tree_at(lambda m: m.layers, dense, layers)
    stats = eqq.calibrate(logits, model, batches(calibration))
    some = batches(calibration)[::2]
    gradients = eqq.squared_gradients(loss, model, some, stats)
    for bits in budgets:
        start = time.process_time()
        rules = eqq.allocate(model, stats, bits, formats, gradients=gradients)
        chosen = eqq.tree_quantize(model, rules, stats=stats)
        jax.block_until_ready(chosen)
        seconds = time.process_time() - start
        # (A stack is compiled quickly.)
        stack = eqq.tree_dequantize(chosen).stacked()
        found = eqq.evaluate(logits, stack, batches(held_out), dense=predictions)
        yield Row(f"within {bits} bits", "allocated", bits_of(chosen), found, seconds)
