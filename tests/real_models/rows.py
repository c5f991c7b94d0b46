"""What a model loses in a format, by several ways to round."""

import dataclasses
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import eqquant as eqq
from eqquant.formats import as_format


methods = ("nearest", "GPTQ", "Sequential")
_batch = 2  # windows at once


class Row(NamedTuple):
    """A model in a format. `seconds` are those of the processor that rounding took,
    without `calibrate`, but with the passes of `Sequential`."""

    format: str
    method: str
    bits: float
    loss: eqq.Evaluation
    seconds: float

    def cells(self):
        loss = self.loss
        return (
            f"`{self.format}`",
            self.method,
            f"{self.bits:.2f}",
            change(loss),
            f"{loss.divergence:.4f}",
            f"{loss.agreement:.1%}",
            f"{self.seconds:.0f}",
        )


def change(loss):
    """The change of the loss and its standard error, in nats per token."""
    return f"{loss.change:+.4f} ± {loss.change_error:.4f}"


def logits(model, tokens):
    return jax.vmap(model)(tokens)


def batches(windows):
    return list(map(jnp.asarray, windows.reshape(-1, _batch, windows.shape[-1])))


def bits_of(model):
    """Of the matrices of layers, which in a stack have an axis of layers."""
    leaves = jtu.tree_leaves(model.layers, is_leaf=eqq.is_quantized)
    ndim = 2 if isinstance(model.layers, list) else 3
    weights = [w for w in leaves if w.ndim >= ndim]
    return 8 * sum(w.nbytes for w in weights) / sum(w.size for w in weights)


def with_activation(model, activation):
    """The model, whose products round their inputs to a format, too."""
    round = lambda w: dataclasses.replace(w, activation=as_format(activation))
    rounded = lambda w: round(w) if eqq.is_quantized(w) else w
    return jtu.tree_map(rounded, model, is_leaf=eqq.is_quantized)


def rows(
    dense, predictions, wanted, calibration, held_out, activation=None, tuned=False
):
    """A row for each of the `wanted` pairs of a format and its methods, as it is
    measured. The embedding stays in float32. `predictions` are those of the dense
    model. Products round their inputs to the format `activation`, if there is one. If
    `tuned`, another row follows each, of norms and scales that were trained."""
    stats = None
    for format, methods in wanted:
        for method in methods:
            if method == "GPTQ" and stats is None:
                stats = eqq.calibrate(logits, dense, batches(calibration))
            how = {
                "nearest": lambda: None,
                "GPTQ": lambda: stats,
                "Sequential": lambda: eqq.Sequential(logits, batches(calibration)),
            }[method]()
            start = time.process_time()
            model = eqq.tree_quantize(dense, as_format(format), stats=how)
            jax.block_until_ready(model)
            seconds = time.process_time() - start
            if activation is not None:
                model = with_activation(model, activation)
            loss = eqq.evaluate(logits, model, batches(held_out), dense=predictions)
            yield Row(format, method, bits_of(model), loss, seconds)
            if tuned:
                start = time.process_time()
                model = eqq.train.tune(logits, dense, model, batches(calibration))
                seconds += time.process_time() - start
                loss = eqq.evaluate(logits, model, batches(held_out), dense=predictions)
                yield Row(format, f"{method}, tuned", bits_of(model), loss, seconds)
