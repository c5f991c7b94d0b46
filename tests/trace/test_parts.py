import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant._trace import uses


# Products that contract parts of an axis of a weight.


key = jr.key(0)
x = np.asarray(jr.normal(key, (5, 16)))
grouped = x.reshape(5, 4, 4)
split = lambda w: w.reshape(-1, 4, 6)

# Each with a function of a weight of shape (16, 6), or of those given, and with the
# inputs and the places in the axis where they are, of each piece.
programs = {
    "halves": (
        lambda w: x[:, :6] @ w[:6] + x[:, 6:] @ w[6:],
        [(x[:, :6], range(6)), (x[:, 6:], range(6, 16))],
    ),
    "split": (
        lambda w: [a @ b for a, b in zip(jnp.split(x, 2, 1), jnp.split(w, 2))],
        [(x[:, :8], range(8)), (x[:, 8:], range(8, 16))],
    ),
    "a half": (lambda w: x[:, :8] @ w[4:12], [(x[:, :8], range(4, 12))]),
    "strides": (
        lambda w: x[:, ::2] @ w[::2] - x[:, 1::2] @ w[1::2],
        [(x[:, i::2], range(i, 16, 2)) for i in range(2)],
    ),
    "groups": (
        lambda w: jnp.einsum("tgs,gso->tgo", grouped, split(w)),
        [(x[:, 4 * i : 4 * i + 4], range(4 * i, 4 * i + 4)) for i in range(4)],
    ),
    "groups of what is apart": (
        lambda w: jnp.einsum("tgs,gso->tso", grouped, split(w)),
        [(x[:, i::4], range(i, 16, 4)) for i in range(4)],
    ),
    "the same for all groups": (
        lambda w: jnp.einsum("ts,gso->tgo", x[:, :4], split(w)),
        [(x[:, :4], range(4 * i, 4 * i + 4)) for i in range(4)],
    ),
    "some groups": (
        lambda w: jnp.einsum("tgs,gso->tgo", grouped[:, :2], split(w[8:])),
        [(x[:, 4 * i : 4 * i + 4], range(8 + 4 * i, 12 + 4 * i)) for i in range(2)],
    ),
    "a part of each group": (
        lambda w: jnp.einsum("tgs,gso->to", grouped[:, 1:3, :2], split(w)[1:3, :2]),
        None,
    ),
    "one group": (lambda w: x[:, :4] @ split(w)[2], None),
    "a group at a time": (
        lambda w: lax.scan(
            lambda y, xw: (y + xw[0] @ xw[1], None),
            jnp.zeros((5, 6)),
            (grouped.transpose(1, 0, 2), split(w)),
        )[0],
        None,
    ),
    "wherever": (
        lambda w: x[:, :4] @ lax.dynamic_slice(w, (jnp.argmax(x), 0), (4, 6)),
        None,
    ),
    "turned": (
        lambda w: x @ jnp.concatenate([w[4:], w[:4]]),
        [(x[:, :12], range(4, 16)), (x[:, 12:], range(4))],
    ),
}


def names():
    return {name: pieces for name, (_, pieces) in programs.items()}


def fn(ws, _):
    return [programs[name][0](w) for name, w in ws.items()]


@pytest.fixture(scope="module")
def stats():
    ws = {name: jr.normal(key, (16, 6)) for name in programs}
    return eqq.calibrate(fn, ws, [x])


@pytest.mark.parametrize(
    "name", [name for name, pieces in names().items() if pieces is not None]
)
def test_grams(name, stats):
    value, rows = np.zeros((16, 16)), 0.0
    for part, places in programs[name][1]:
        part = np.asarray(part, np.float64)
        value[np.ix_(places, places)] += part.T @ part
        rows += 5 * len(places) / 16
    found = stats[name]
    assert found.contracted == (0,)
    np.testing.assert_allclose(found.value[0], value, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.rows, [rows])


def test_parts_that_are_not_known(stats):
    unknown = {name for name, pieces in names().items() if pieces is None}
    assert not unknown & {*stats}
    assert unknown == {name for name, _ in stats.incomplete}


def test_uses():
    ws = {name: np.ones((16, 6), np.float32) for name in programs}
    found = dict(zip(sorted(ws), uses(fn, (ws, x))))
    for name, use in found.items():
        if name == "a part of each group":
            assert (use.products, use.others) == ((), ("dot_general",))
            continue
        assert use.products and use.others == ()
        for product in use.products:
            assert (product.contracted, product.whole) == ((0,), False)


# Each runs quantized, as if it were dequantized.
def test_example():
    ws = {name: jr.normal(key, (16, 6)) for name in programs}
    run = eqq.implicit(fn)
    q = eqq.tree_quantize(ws, "int8", min_size=0, example=(run, (x,)))
    assert not eqq.is_quantized(q.pop("a part of each group"))
    assert all(map(eqq.is_quantized, q.values()))
    expected = fn(eqq.tree_dequantize(q), x)
    for a, b in zip(jtu.tree_leaves(run(q, x)), jtu.tree_leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_nothing_that_is_known():
    fn, _ = programs["one group"]
    match = "`fn`.*'w'.*of `w`, which part of it some products contract is not known"
    with pytest.raises(ValueError, match=match):
        eqq.calibrate(lambda ws, _: fn(ws["w"]), {"w": jnp.ones((16, 6))}, [x])
