import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

import eqquant as eqq

from .test_calibrate import check, gram, key, x


def test_experts():
    w = jr.normal(key, (4, 16, 6))
    xs = np.asarray(jr.normal(key, (4, 5, 16)))
    stats = eqq.calibrate(lambda w, x: jnp.einsum("etk,ekn->etn", x, w[0]), [w], [xs])
    check(stats["0"], np.stack([gram(a) for a in xs])[:, None], 5)


@pytest.mark.parametrize("diagonal_above", [8192, 8])
def test_ragged_experts(diagonal_above):
    w = jr.normal(key, (4, 16, 6))
    sizes = np.array([3, 0, 4, 0], np.int32)
    value = np.stack([gram(x[:3]), 0 * gram(x), gram(x[3:7]), 0 * gram(x)])
    if diagonal_above < 16:
        value = np.diagonal(value, axis1=1, axis2=2)
    fn = lambda w, x: lax.ragged_dot(x, w["w"], jnp.asarray(sizes))
    stats = eqq.calibrate(fn, {"w": w}, [x], diagonal_above=diagonal_above)
    check(stats["w"], value[:, None], sizes[:, None])
    assert stats["w"].is_diagonal == (diagonal_above < 16)


def indexed(w, x, ids):
    return jnp.einsum("tk,tkn->tn", x, w[ids])


def mapped_over_tokens(w, x, ids):
    return jax.vmap(lambda x, i: x @ w[i])(x, ids)


def swapped(w, x, ids):
    chosen = jnp.swapaxes(w[ids.reshape(2, -1)], 0, 1)
    return jnp.einsum("btk,tbkn->btn", x.reshape(2, -1, x.shape[1]), chosen)


# Each token picks its expert.
@pytest.mark.examples(3)
@pytest.mark.parametrize("diagonal_above", [8192, 8])
@pytest.mark.parametrize("fn", [indexed, mapped_over_tokens, swapped])
def test_picked_experts(fn, diagonal_above):
    w = jr.normal(key, (4, 16, 6))
    ids = np.array([2, 0, 0, 3, 2, 2, 0, 3])
    value = np.stack([gram(x[ids == i]) for i in range(4)])
    if diagonal_above < 16:
        value = np.diagonal(value, axis1=1, axis2=2)
    call = lambda w, batch: fn(w["w"], *batch)
    batches = [(x, ids)]
    stats = eqq.calibrate(call, {"w": w}, batches, diagonal_above=diagonal_above)
    assert stats.incomplete == ()
    check(stats["w"], value[:, None], [[3], [0], [3], [2]])


# Each token goes to several experts, in several layers, and rows of one sequence pick
# together.
def test_experts_picked_in_layers():
    w = jr.normal(key, (3, 4, 6, 16))
    xs = np.asarray(jr.normal(key, (2, 5, 16)))
    ids = np.asarray(jr.randint(key, (3, 2, 2), 0, 4))

    def fn(w, batch):
        xs, ids = batch
        step = lambda _, each: (0, jnp.einsum("btk,benk->betn", xs, each[0][each[1]]))
        return lax.scan(step, 0, (w["w"], ids))

    stats = eqq.calibrate(fn, {"w": w}, [(xs, ids)])
    value, rows = np.zeros((3, 4, 1, 16, 16)), np.zeros((3, 4, 1))
    for layer, b, e in np.ndindex(3, 2, 2):
        value[layer, ids[layer, b, e], 0] += gram(xs[b])
        rows[layer, ids[layer, b, e], 0] += 5
    check(stats["w"], value, rows)
