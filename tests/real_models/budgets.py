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


def rows(dense, predictions, budgets, formats, methods, calibration, held_out):
    """A row for each budget and method, as it is measured. Each layer has formats of
    its own, chosen from gradients on half of the batches."""
    number = dense.config.depth
    layers = [jtu.tree_map(lambda a: a[i], dense.layers) for i in range(number)]
    model = eqx.tree_at(lambda m: m.layers, dense, layers)
    text = batches(calibration)
    stats = eqq.calibrate(logits, model, text)
    gradients = eqq.squared_gradients(loss, model, text[::2], stats)
    found = eqq.sensitivity(model, stats, formats, gradients=gradients)
    given = {"GPTQ": stats, "Sequential": eqq.Sequential(logits, text)}
    for bits in budgets:
        for method in [method for method in methods if method in given]:
            start = time.process_time()
            rules = found.allocate(bits)
            chosen = eqq.tree_quantize(model, rules, stats=given[method])
            jax.block_until_ready(chosen)
            seconds = time.process_time() - start
            # (A stack is compiled quickly.)
            stack = eqq.tree_dequantize(chosen).stacked()
            lost = eqq.evaluate(logits, stack, batches(held_out), dense=predictions)
            names = f"within {bits} bits", f"{method}, allocated"
            yield Row(*names, bits_of(chosen), lost, seconds)
