import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array

import eqquant as eqq


class Bigrams(eqx.Module):
    """Predicts each token from the one before."""

    embedding: Array
    head: Array

    def __call__(self, tokens):
        return self.embedding[tokens] @ self.head


key1, key2, key3 = jr.split(jr.key(0), 3)
model = Bigrams(jr.normal(key1, (11, 32)), jr.normal(key2, (32, 11)))
quantized = eqx.tree_at(lambda m: m.head, model, eqq.quantize(model.head, "int4"))
tokens = np.asarray(jr.randint(key3, (6, 20), 0, 11))
fn = lambda model, tokens: model(tokens)


def logs(model):
    """The logarithms of the probabilities, in float64."""
    head = np.asarray(eqq.tree_dequantize(model).head, np.float64)
    logits = np.asarray(model.embedding, np.float64)[tokens] @ head
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))


def losses(model):
    return -np.take_along_axis(logs(model)[:, :-1], tokens[:, 1:, None], -1)[..., 0]


@pytest.mark.parametrize("masked", (False, True))
def test_against_numpy(masked):
    mask = np.ones(tokens.shape, bool)
    if masked:
        mask[2:, 7:] = False
    batches = [(tokens[:4], mask[:4]), (jnp.asarray(tokens[4:]), mask[4:])]
    if not masked:
        batches = [tokens[:4], jnp.asarray(tokens[4:])]
    found = eqq.evaluate(fn, quantized, iter(batches), dense=model)
    counts = mask[:, 1:]
    loss, dense = losses(quantized)[counts], losses(model)[counts]
    p, q = logs(model)[:, :-1], logs(quantized)[:, :-1]
    divergence = np.sum(np.exp(p) * (p - q), -1)[counts]
    same = (p.argmax(-1) == q.argmax(-1))[counts]
    error = lambda a: np.std(a, ddof=1) / np.sqrt(a.size)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert found.tokens == counts.sum()
    close([found.loss, found.loss_error], [loss.mean(), error(loss)])
    close(found.perplexity, np.exp(loss.mean()))
    close(found.dense_loss, dense.mean())
    close(found.change, (loss - dense).mean())
    close(found.change_error, error(loss - dense))
    close(found.divergence, divergence.mean())
    close(found.agreement, same.mean())
    alone = eqq.evaluate(fn, quantized, batches)
    assert alone.loss == found.loss and alone.change is None


# Tokens that a model rules out have no part in the divergence.
def test_impossible_tokens():
    ruled_out = lambda model, tokens: model(tokens).at[..., 0].set(-jnp.inf)
    text = np.maximum(tokens, 1)
    found = eqq.evaluate(ruled_out, quantized, [text], dense=model)
    assert np.isfinite(found.divergence) and found.divergence > 0
    same = eqq.evaluate(ruled_out, model, [text], dense=model)
    assert (same.change, same.divergence, same.agreement) == (0, 0, 1)


def test_printed():
    found = eqq.evaluate(fn, quantized, [tokens], dense=model)
    lines = repr(found).splitlines()
    assert len(lines) == 5 and all(len(line) < 80 for line in lines)
    assert f"{found.perplexity:.4g}" in lines[0] and "114 tokens" in lines[-1]
    assert len(repr(eqq.evaluate(fn, model, [tokens])).splitlines()) == 2


def test_errors():
    with pytest.raises(ValueError, match="tokens to predict. Got none"):
        eqq.evaluate(fn, model, [])
    with pytest.raises(ValueError, match="tokens to predict. Got none"):
        eqq.evaluate(fn, model, [tokens[:, :1]])
    with pytest.raises(ValueError, match="pass `\\[batch\\]`"):
        eqq.evaluate(fn, model, tokens)
    with pytest.raises(ValueError, match="arrays of integers.*float32"):
        eqq.evaluate(fn, model, [np.ones((2, 3), np.float32)])
    with pytest.raises(ValueError, match="from 0 to 10.*to 12"):
        eqq.evaluate(fn, model, [tokens + 2])
    with pytest.raises(ValueError, match="booleans of the shape"):
        eqq.evaluate(fn, model, [(tokens, tokens[:, 1:] > 0)])
    with pytest.raises(ValueError, match="`fn` should give logits.*Got the shape"):
        eqq.evaluate(lambda m, t: m(t)[..., -1, :], model, [tokens])
    with pytest.raises(ValueError, match="`fn` should give logits.*Got tuple"):
        eqq.evaluate(lambda m, t: (m(t), t), model, [tokens])


@pytest.mark.parametrize("top", (None, 11, 4))
def test_kept_predictions(top):
    batches = [tokens[:4], (tokens[4:], tokens[4:] > 2)]
    kept = eqq.predictions(fn, model, batches, top=top)
    assert "120 tokens" in repr(kept)
    at_once = eqq.evaluate(fn, quantized, batches, dense=model)
    found = eqq.evaluate(fn, quantized, batches, dense=kept)
    if top == 4:
        # The rest counts as one token.
        assert 0.5 * at_once.divergence < found.divergence < at_once.divergence
        found = dataclasses.replace(found, divergence=at_once.divergence)
    assert found == at_once
    same = eqq.evaluate(fn, model, batches, dense=kept)
    assert (same.change, same.agreement) == (0, 1) and abs(same.divergence) < 1e-6


def test_the_rest_counts_as_one_token():
    kept = eqq.predictions(fn, model, [tokens], top=4)
    found = eqq.evaluate(fn, quantized, [tokens], dense=kept)
    p, q = (np.exp(logs(m)[:, :-1]) for m in (model, quantized))
    first = np.argsort(-p, -1)[..., :4]
    p, q = (np.take_along_axis(a, first, -1) for a in (p, q))
    p, q = (np.concatenate([a, 1 - a.sum(-1, keepdims=True)], -1) for a in (p, q))
    expected = np.sum(p * np.log(p / q), -1).mean()
    np.testing.assert_allclose(found.divergence, expected, rtol=1e-4)


def test_predictions_of_other_batches():
    kept = eqq.predictions(fn, model, [tokens[:3], tokens[3:]])
    for batches in ([tokens], [tokens[:3], tokens[:3]], [tokens[:3], tokens[3:]] * 2):
        with pytest.raises(ValueError, match="predictions of the same batches"):
            eqq.evaluate(fn, quantized, batches, dense=kept)
    with pytest.raises(ValueError, match="2 batches. Got 1 batches"):
        eqq.evaluate(fn, quantized, [tokens[:3]], dense=kept)
    with pytest.raises(ValueError, match="`top` should be positive"):
        eqq.predictions(fn, model, [tokens], top=0)
    with pytest.raises(ValueError, match="from 0 to 10.*to 12"):
        eqq.predictions(fn, model, [tokens + 2])


# The dense model runs once, and not again for each of the others.
def test_dense_model_runs_once():
    runs = []

    def counted(model, tokens):
        if isinstance(model.head, jnp.ndarray):
            jax.debug.callback(lambda: runs.append(1))
        return model(tokens)

    kept = eqq.predictions(counted, model, [tokens])
    for _ in range(3):
        eqq.evaluate(counted, quantized, [tokens], dense=kept)
    jax.effects_barrier()
    assert len(runs) == 1
