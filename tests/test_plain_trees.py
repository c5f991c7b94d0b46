"""Trees of plain containers: what is a guess is told, and what is certain is quiet."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant.train import tree_fake_quantize

from .helpers import check_warned_here, normal


ids = jnp.arange(5)


def heads():
    return {"kernel": normal(64, 4, 16), "dense": normal(64, 64)}


class Heads(eqx.Module):
    kernel: jax.Array


doubtful = {
    "heads": (heads, "`kernel`, of shape (64, 4, 16), along axis -2: few"),
    "few": (lambda: [normal(4, 512)], "`0`, of shape (4, 512), along axis -2: few"),
    "table": (
        lambda: {"Embed_0": {"embedding": normal(100, 64)}},
        "`Embed_0.embedding`, of shape (100, 64), along axis -2: by its name",
    ),
    "root": (lambda: normal(3, 8, 64), "`(root)`, of shape (3, 8, 64)"),
    "named by a rule": (
        lambda: Heads(normal(64, 4, 8)),
        "`kernel`, of shape (64, 4, 8), along axis -1: few",
    ),
}


@pytest.mark.parametrize("fn", (eqq.tree_quantize, tree_fake_quantize))
@pytest.mark.parametrize("name", doubtful)
def test_guesses(name, fn):
    make, text = doubtful[name]
    rules = eqq.Rules([("*", "int8")])
    with pytest.warns(UserWarning, match="The axis that products contract") as caught:
        fn(make(), rules)
    message = str(caught[0].message)
    assert text in message and "`axis=`" in message
    assert "`example=`" in message
    check_warned_here(caught[0], __file__)
    fn(make(), rules, axis=-2)  # (No warning.)


def test_what_is_certain_is_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eqq.tree_quantize({"w": normal(64, 64), "heads": normal(4)}, "int8")
        eqq.tree_quantize({"layers": normal(4, 32, 64)}, "int8")
        stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 64, key=key))
        eqq.tree_quantize(stack(jr.split(jr.key(0), 4)), "int8")
        fn = lambda p, x: (
            jnp.einsum("bi,ihd->bhd", x, p["kernel"]).sum(1) @ jnp.ones((16, 2))
        )
        q = eqq.tree_quantize(
            heads(), "int8", example=(eqq.implicit(fn), (normal(2, 64),))
        )
    assert q["kernel"].axis == -3 and q["kernel"].bits_per_weight < 9
    # (The example does not use it.)
    assert not eqq.is_quantized(q["dense"])


def tables():
    return {"emb": normal(100, 64), "pos": normal(32, 64), "w": normal(64, 64)}


def logits(p, ids):
    x = p["emb"][ids] + jnp.take(p["pos"], jnp.arange(len(ids)), axis=0)
    return x @ p["w"]


@pytest.mark.parametrize("embeddings", (True, False))
def test_tables_that_are_looked_up(embeddings):
    example = (eqq.implicit(logits), (ids,))
    p = tables()
    q = eqq.tree_quantize(p, "int8", example=example, embeddings=embeddings)
    found = {name: x.axis for name, x in q.items() if eqq.is_quantized(x)}
    assert found == {"w": -2} | ({"emb": -1, "pos": -1} if embeddings else {})
    expected = np.asarray(logits(p, ids))
    error = np.asarray(eqq.implicit(logits)(q, ids)) - expected
    assert np.abs(error).max() < 0.02 * np.abs(expected).max()
    if not embeddings:
        hints = {row.path: row.hint for row in eqq.report(q, example=example).rows}
        assert hints["emb"] == hints["pos"] == "Pass `embeddings=True`"


class Positions(eqx.Module):
    table: jax.Array
    linear: eqx.nn.Linear

    def __call__(self, ids):
        return jax.vmap(self.linear)(jnp.take(self.table, ids, axis=0))


def test_tables_of_modules():
    model = Positions(normal(100, 64), eqx.nn.Linear(64, 64, key=jr.key(0)))
    plain = eqq.tree_quantize(model, "int8", example=ids)
    assert eqq.is_quantized(plain.linear.weight) and not eqq.is_quantized(plain.table)
    q = eqq.tree_quantize(model, "int8", example=ids, embeddings=True)
    assert q.table.axis == -1
    expected = np.asarray(model(ids))
    assert np.abs(np.asarray(q(ids)) - expected).max() < 0.02 * np.abs(expected).max()


def test_the_error_names_the_array_that_fails():
    params = {
        "a": {"kernel": normal(64, 64)},
        "b": {"kernel": normal(64, 4, 16)},
        "c": {"kernel": normal(64, 64)},
    }

    def apply(p, x):
        y = jnp.einsum("bi,ihd->bhd", x, p["b"]["kernel"])
        return y.reshape(x.shape) @ p["a"]["kernel"] @ p["c"]["kernel"]

    with pytest.raises(ValueError, match="`b.kernel` cannot be quantized") as error:
        eqq.tree_quantize(params, "int8", example=(apply, (normal(2, 64),)))
    assert "(eqquant.implicit(fn), args)" in str(error.value)
    assert "the modules around it" not in str(error.value)
