import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import jaxtyping
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant.formats import Layout

from ..helpers import decode, each_row, normal


format = eqq.Int(2, 16, "minimum")
fn = lambda model, x: jax.vmap(model)(x)


def inputs(seed, rows=200, k=32):
    mix = np.asarray(normal(k, k, seed=7)) * 0.8 ** np.arange(k)[:, None]
    return jnp.asarray(np.asarray(normal(rows, k, seed=seed)) @ mix, jnp.float32)


batches = [inputs(0), inputs(1, rows=120)]


class Stack(eqx.Module):
    """Layers in a scan, from the first or from the last on."""

    up: jax.Array
    down: jax.Array
    reverse: bool = eqx.field(static=True, default=False)

    def __call__(self, x):
        @jax.checkpoint
        def layer(x, weights):
            up, down = weights
            return x + jnp.tanh(up @ x) @ down, None

        return lax.scan(layer, x, (self.up, self.down), reverse=self.reverse)[0]

    def unrolled(self):
        layers = list(zip(self.up, self.down))
        return Unrolled(layers[::-1] if self.reverse else layers)


class Unrolled(eqx.Module):
    layers: list[tuple[jax.Array, jax.Array]]

    def __call__(self, x):
        for up, down in self.layers:
            x = x + jnp.tanh(up @ x) @ down
        return x


def stack(reverse=False):
    up, down = (normal(2, 48, 32, seed=i) for i in range(2))
    return Stack(up / 6, down / 6, reverse)


def lost(model, q):
    x = inputs(9, rows=400)
    y, z = (np.asarray(each_row(m, x)) for m in (model, eqq.tree_dequantize(q)))
    return np.sum((z - y) ** 2) / np.sum(y**2)


def quantize(model, stats, **options):
    return eqq.tree_quantize(
        model, format, min_size=0, stats=stats, example=inputs(0)[0], **options
    )


# (XLA:CPU has no product of what both models share with what they do not.)
@pytest.mark.thorough
def test_bfloat16():
    model = eqx.nn.MLP(32, 32, 48, depth=1, key=jr.key(0))
    half = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    low, rows = jtu.tree_map(half, (model, batches))
    found = eqq.tree_quantize(
        low, eqq.Int4(16), min_size=0, stats=eqq.Sequential(fn, rows)
    )
    nearest = eqq.tree_quantize(low, eqq.Int4(16), min_size=0)
    x = inputs(9, rows=400).astype(jnp.bfloat16)
    y, new, old = (
        np.asarray(each_row(eqq.tree_dequantize(m), x), np.float64)
        for m in (low, found, nearest)
    )
    assert np.sum((new - y) ** 2) < 0.6 * np.sum((old - y) ** 2)


def test_by_hand():
    """Against sums in float64, of a model whose layers are called one by one."""
    model = eqx.nn.MLP(32, 32, 32, depth=1, key=jr.key(0))
    found = eqq.tree_quantize(
        model, format, min_size=0, stats=eqq.Sequential(fn, batches, mix=0.7)
    )
    dense = eqq.tree_dequantize(found)

    def seen(model, i, x):
        for layer in model.layers[:i]:
            w, b = (np.asarray(a, np.float64) for a in (layer.weight, layer.bias))
            x = np.maximum(x @ w.T + b, 0)
        return x

    every = np.concatenate(batches).astype(np.float64)
    for i, layer in enumerate(model.layers):
        x, y = seen(model, i, every), seen(dense, i, every)
        gram, cross = y.T @ y, x.T @ y
        w = np.asarray(layer.weight, np.float64)
        mean = np.mean(np.diagonal(gram))
        damped = gram + 0.01 * mean * np.eye(len(gram))
        w += 0.7 * np.linalg.solve(damped, (w @ (cross - gram)).T).T
        wanted = eqq.GPTQ().solve(jnp.float32(w), format, jnp.float32(gram))
        wanted = decode(Layout(format), wanted)
        q = np.asarray(dense.layers[i].weight)
        # (Sums of another order may round a number to the next point.)
        assert np.mean(np.abs(q - wanted) > 1e-4) < 0.02
        error = lambda a: np.sum(((a - w) @ np.linalg.cholesky(damped)) ** 2)
        np.testing.assert_allclose(error(q), error(np.asarray(wanted)), rtol=0.02)


@pytest.mark.thorough
def test_less_is_lost():
    model = eqx.nn.MLP(32, 32, 48, depth=3, key=jr.key(0))
    one_pass = quantize(model, eqq.calibrate(fn, model, batches))
    whole, none = (
        quantize(model, eqq.Sequential(fn, batches, mix=mix)) for mix in (1.0, 0.0)
    )
    assert lost(model, whole) < 0.9 * lost(model, one_pass)
    assert lost(model, whole) < lost(model, none)
    assert jtu.tree_structure(whole) == jtu.tree_structure(one_pass)


@pytest.mark.thorough
@pytest.mark.parametrize("reverse", (False, True))
def test_layers_of_a_scan_come_one_after_another(reverse):
    model = stack(reverse)
    q = quantize(model, eqq.Sequential(fn, batches))
    assert q.up.shape == model.up.shape and q.down.axis == -2
    plain = model.unrolled()
    wanted = quantize(plain, eqq.Sequential(fn, batches))
    found = eqq.tree_dequantize(q).unrolled()
    x = inputs(3)
    np.testing.assert_allclose(lost(model, q), lost(plain, wanted), rtol=0.05)
    close = [
        np.mean(np.abs(a - b) < 1e-4)
        for a, b in zip(
            jtu.tree_leaves(found), jtu.tree_leaves(eqq.tree_dequantize(wanted))
        )
    ]
    assert min(close) > 0.9
    wanted = each_row(eqq.tree_dequantize(q), x)
    np.testing.assert_allclose(each_row(q, x), wanted, atol=1e-4)
    once = quantize(model, eqq.calibrate(fn, model, batches))
    assert jtu.tree_structure(q) == jtu.tree_structure(once)
    assert lost(model, q) < lost(model, once)


class Experts(eqx.Module):
    router: jax.Array
    inner: jax.Array
    outer: jax.Array

    def __call__(self, x):
        chosen = jnp.argmax(x @ self.router, axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=len(self.inner))
        y = jnp.tanh(lax.ragged_dot(x[order], self.inner, sizes))
        y = lax.ragged_dot(y, self.outer, sizes)
        return y[jnp.argsort(order)]


@pytest.mark.thorough
def test_experts_meet_the_rows_that_they_met():
    keys = jr.split(jr.key(0), 3)
    shapes = ((32, 4), (4, 32, 48), (4, 48, 32))
    model = Experts(*(jr.normal(k, s) / 6 for k, s in zip(keys, shapes)))
    call = lambda model, x: model(x)
    one = lambda stats: eqq.tree_quantize(
        model,
        eqq.Rules([("router", eqq.Int(2, 16)), ("*", format)]),
        min_size=0,
        stats=stats,
        example=inputs(0),
    )
    many = [inputs(i, rows=800) for i in range(3)]
    found = one(eqq.Sequential(call, many, mix=1.0))
    once = one(eqq.calibrate(call, model, many))
    assert found.inner.format == format and found.router.format != format
    x = inputs(9, rows=1000)
    # Both with the routing of the original.
    routed = lambda q: eqx.tree_at(
        lambda m: m.router, eqq.tree_dequantize(q), model.router
    )
    y = model(x)
    loss = lambda q: jnp.sum((routed(q)(x) - y) ** 2)
    assert loss(found) < loss(once)


def test_tied():
    class Tied(eqx.Module):
        first: eqx.nn.Linear
        again: eqx.nn.Linear

        def __call__(self, x):
            return self.again(jnp.tanh(self.first(x)))

    linear = eqx.nn.Linear(32, 32, key=jr.key(0))
    model = Tied(linear, linear)
    q = quantize(model, eqq.Sequential(fn, batches))
    assert q.first.weight is q.again.weight


@pytest.mark.thorough
def test_methods_and_what_is_not_known():
    model = eqx.nn.MLP(32, 16, 48, depth=1, key=jr.key(0))
    stats = eqq.Sequential(fn, batches)
    q = quantize(model, stats, method=eqq.ScaleSearch())
    assert lost(model, q) < lost(model, eqq.tree_quantize(model, format, min_size=0))
    pair = {"a": model, "b": eqx.nn.Linear(32, 16, key=jr.key(1))}
    stats = eqq.Sequential(lambda m, x: fn(m["a"], x), batches)
    with pytest.warns(UserWarning, match="`b.weight` entered no product.*ScaleSearch"):
        q = eqq.tree_quantize(pair, format, min_size=0, stats=stats)
    searched = eqq.tree_quantize(pair, format, min_size=0, method=eqq.ScaleSearch())
    assert eqx.tree_equal(q["b"], searched["b"])
    few = eqq.Sequential(fn, [inputs(0, rows=20)])
    with pytest.warns(UserWarning, match="fewer rows"):
        eqq.tree_quantize(model, format, min_size=0, stats=few)


def test_errors():
    model = eqx.nn.MLP(32, 16, 48, depth=1, key=jr.key(0))
    with pytest.raises(ValueError, match=r"`batches`.*pass `\[batch\]`"):
        eqq.Sequential(fn, inputs(0))
    with pytest.raises(ValueError, match=r"`batches`.*one dict"):
        eqq.Sequential(fn, {"x": inputs(0)})
    with pytest.raises(ValueError, match="`mix` should be between"):
        eqq.Sequential(fn, batches, mix=2.0)
    # (Type checkers find this, too.)
    wrong = (ValueError, jaxtyping.TypeCheckError)
    with pytest.raises(wrong, match="(?s)keep.*'memory'"):
        eqq.Sequential(fn, batches, keep="memory")
    with pytest.raises(ValueError, match="`keep_dtype`.*int8"):
        eqq.Sequential(fn, batches, keep_dtype=jnp.int8)
    with pytest.raises(ValueError, match="at least one batch"):
        eqq.tree_quantize(model, stats=eqq.Sequential(fn, []))
    with pytest.raises(ValueError, match="`fn` should apply `model`"):
        eqq.tree_quantize(model, stats=eqq.Sequential(lambda m, x: x, batches))
    with pytest.raises(ValueError, match="`layers.0.weight` along the axes"):
        eqq.tree_quantize(model, min_size=0, axis=-2, stats=eqq.Sequential(fn, batches))
    bad = [batches[0].at[0, 0].set(jnp.nan)]
    with pytest.raises(ValueError, match="finite inputs.*layers.0.weight"):
        eqq.tree_quantize(model, stats=eqq.Sequential(fn, bad), min_size=0)
    with pytest.raises(TypeError, match="`method`"):
        eqq.tree_quantize(model, stats=eqq.Sequential(fn, batches), method="gptq")
