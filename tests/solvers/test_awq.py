import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant.demo import LanguageModel
from eqquant.formats import Layout

from ..helpers import decode, trees_equal


fn = lambda model, x: jax.vmap(model)(x)
jitted = eqx.filter_jit(fn)


class Net(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def model():
    """A norm whose channels are of different sizes."""
    keys = jr.split(jr.key(0), 2)
    net = Net(
        eqx.nn.LayerNorm(64),
        eqx.nn.Linear(64, 64, key=keys[0]),
        eqx.nn.Linear(64, 64, key=keys[1]),
    )
    sizes = jnp.exp(jr.normal(jr.key(3), (64,)))
    return eqx.tree_at(lambda net: net.norm.weight, net, sizes)


x = jr.normal(jr.key(1), (400, 64))


@pytest.fixture(scope="module")
def stats(model):
    return eqq.calibrate(fn, model, [x])


def quantize(model, stats, method, format="int4"):
    return eqq.tree_quantize(model, format, min_size=0, stats=stats, method=method)


def first_error(model, q):
    """Of the products of the first layer, in float64."""
    y = np.asarray(jitted(model.norm, x), np.float64)
    z = np.asarray(jitted(q.norm, x), np.float64)
    w, v = (
        np.asarray(eqq.tree_dequantize(m).up.weight, np.float64) for m in (model, q)
    )
    return np.sum((y @ w.T - z @ v.T) ** 2) / np.sum((y @ w.T) ** 2)


@pytest.mark.examples(1)
@pytest.mark.parametrize("then", (eqq.ScaleSearch(), eqq.GPTQ()))
def test_large_inputs_lose_less(model, stats, then):
    plain = quantize(model, stats, then)
    scaled = quantize(model, stats, eqq.AWQ(then=then))
    assert first_error(model, scaled) < 0.97 * first_error(model, plain)
    assert not np.allclose(scaled.norm.weight, model.norm.weight)
    dense = eqq.tree_dequantize(scaled)
    y, z = jitted(scaled, x), jitted(dense, x)
    np.testing.assert_allclose(y, z, rtol=1e-3, atol=1e-2)


def test_scales_by_hand(model, stats):
    method = eqq.AWQ(tries=4)
    gram = np.asarray(stats["up.weight"].value[0], np.float64)
    size = np.sqrt(np.diagonal(gram))
    losses = {}
    format = eqq.Int4()

    def rounded(w, s):
        inputs = jnp.float32(size**2 / s**2)
        stored = eqq.ScaleSearch().solve(jnp.float32(w * s), format, inputs)
        return np.asarray(decode(Layout(format), stored), np.float64)

    w = np.asarray(model.up.weight, np.float64)
    for power in np.arange(5) / 4:
        s = size**power
        s /= np.sqrt(s.max() * s.min())
        e = rounded(w, s) / s - w
        losses[power] = np.sum((e @ gram) * e), s
    _, s = min(losses.values(), key=lambda pair: pair[0])
    q = quantize(model, stats, method)
    np.testing.assert_allclose(q.norm.weight * s, model.norm.weight, rtol=1e-4)
    root = np.linalg.cholesky(gram + 1e-6 * np.eye(64))
    loss = np.sum(((rounded(w, s) / s - w) @ root) ** 2) / np.sum((w @ root) ** 2)
    np.testing.assert_allclose(first_error(model, q), loss, rtol=0.05)


@pytest.mark.thorough
def test_stacks_have_scales_of_their_own():
    model = LanguageModel(32, 3, 4, key=jr.key(0))
    large = jnp.exp(jr.normal(jr.key(1), (3, 32)))
    model = eqx.tree_at(lambda m: m.blocks.norm1.weight, model, large)
    text = jr.randint(jr.key(2), (16, 65), 0, 256).astype(jnp.uint8)
    stats = eqq.calibrate(fn, model, [text])
    q = quantize(model, stats, eqq.AWQ(), eqq.Int4(16))
    moved = np.asarray(model.blocks.norm1.weight / q.blocks.norm1.weight)
    assert np.ptp(np.std(np.log(moved), axis=1)) > 0
    # What is not quantized takes the scales, too.
    only = eqq.tree_quantize(
        model,
        eqq.Rules([("blocks.up.weight", "int8"), ("*", None)]),
        stats=stats,
        method=eqq.AWQ(),
    )
    assert trees_equal(only.blocks.norm1, model.blocks.norm1)
    y = fn(model, text)
    np.testing.assert_allclose(fn(only, text), y, atol=0.02 * np.abs(y).max())


def test_what_cannot_be_scaled(model, stats):
    tied = {"a": model, "b": model.norm}
    call = lambda m, x: fn(m["a"], x)
    found = eqq.calibrate(call, tied, [x])
    q = eqq.tree_quantize(tied, "int4", min_size=0, stats=found, method=eqq.AWQ())
    assert trees_equal(q["a"].norm, model.norm)
    linear = eqx.nn.Linear(64, 32, key=jr.key(0))
    alone = eqq.calibrate(fn, linear, [x])
    with pytest.warns(UserWarning, match="scales no weight.*ScaleSearch"):
        q = quantize(linear, alone, eqq.AWQ())
    assert trees_equal(q, quantize(linear, alone, eqq.ScaleSearch()))
    loaded = eqq.Statistics.from_tree(stats.as_tree())
    assert trees_equal(
        quantize(model, loaded, eqq.AWQ()), quantize(model, stats, eqq.AWQ())
    )


class Split(eqx.Module):
    norm: jax.Array
    first: jax.Array
    second: jax.Array

    def __call__(self, x):
        y = x * self.norm[None]
        return y[:200] @ self.first, y[200:] @ self.second


@pytest.fixture(scope="module")
def split():
    shapes = ((64,), (64, 32), (64, 48))
    model = Split(*(jr.normal(jr.key(i), s) for i, s in enumerate(shapes)))
    return model, eqq.calibrate(lambda model, x: model(x), model, [x])


def test_inputs_of_one_fold_are_scaled_together(split):
    _, found = split
    ((_, weights),) = found.folds
    assert [path for path, _ in weights] == ["first", "second"]
    scales = jnp.exp(jr.normal(jr.key(9), (64,)))
    moved = found.scaled(weights, scales)
    for path, _ in weights:
        wanted = found[path].value[0] * scales[:, None] * scales[None]
        np.testing.assert_allclose(moved[path].value[0], wanted, rtol=1e-5)


@pytest.mark.thorough
def test_weights_of_one_fold_with_inputs_of_their_own(split):
    model, found = split
    plain, scaled = (
        eqq.tree_quantize(
            model, "int4", stats=found, method=method, example=x, min_size=0
        )
        for method in (eqq.ScaleSearch(), eqq.AWQ())
    )
    y = model(x)
    off = lambda q: sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(q(x), y))
    assert off(scaled) < 1.05 * off(plain) < 0.02 * sum(float(jnp.sum(a**2)) for a in y)


def test_errors(model, stats):
    wider = Net(
        eqx.nn.LayerNorm(128), eqx.nn.Linear(128, 64, key=jr.key(0)), model.down
    )
    with pytest.raises(ValueError, match="`up.weight`: `gram`"):
        quantize(wider, stats, eqq.AWQ())
    with pytest.raises(ValueError, match="`tries`"):
        eqq.AWQ(tries=0)
    with pytest.raises(ValueError, match="`then` should be a method"):
        eqq.AWQ(then=eqq.AWQ())
    with pytest.raises(ValueError, match="`method` AWQ.*needs"):
        eqq.tree_quantize(model, method=eqq.AWQ())
    with pytest.raises(ValueError, match="`AWQ` scales weights before"):
        quantize(model, eqq.Sequential(fn, [x]), eqq.AWQ())
