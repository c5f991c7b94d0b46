import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant._solvers import solved

from .helpers import normal


fn = lambda model, xs: jax.vmap(model)(xs)


def correlated(seed, rows, k):
    mix = (
        jr.normal(jr.key(7), (k, k)) * 0.8 ** jnp.arange(k, dtype=jnp.float32)[:, None]
    )
    return jr.normal(jr.key(seed), (rows, k)) @ mix


@pytest.fixture(scope="module")
def model():
    return eqx.nn.MLP(32, 32, 32, depth=1, key=jr.key(0))


@pytest.fixture(scope="module")
def stats(model):
    return eqq.calibrate(fn, model, [correlated(i, 100, 32) for i in range(2)])


def first_layer_error(model, q):
    x = np.asarray(correlated(9, 200, 32), np.float64)
    a, b = (np.asarray(m, np.float64) for m in (model.layers[0].weight, _dense(q, 0)))
    return np.sum((x @ (a - b).T) ** 2) / np.sum((x @ a.T) ** 2)


def _dense(q, i):
    return q.layers[i].weight.dequantize()


def test_less_is_lost(model, stats):
    format = eqq.Int4(16)
    quantize = lambda **kwargs: eqq.tree_quantize(model, format, min_size=0, **kwargs)
    rounded = first_layer_error(model, quantize())
    searched = first_layer_error(model, quantize(method=eqq.ScaleSearch()))
    solved = first_layer_error(model, quantize(stats=stats, method=eqq.GPTQ()))
    assert solved < 0.5 * rounded
    assert solved < searched < 1.05 * rounded
    q = quantize(stats=stats)
    same = quantize(stats=stats, method=eqq.GPTQ())
    assert eqx.tree_equal(q, same)
    assert q.layers[0].weight.format == format
    assert jnp.all(jnp.isfinite(fn(q, correlated(3, 5, 32))))


def test_with_an_example(stats, model):
    class Own(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return jnp.einsum("io,i->o", self.weight, x)

    own = Own(model.layers[0].weight.T)
    x = correlated(0, 100, 32)
    found = eqq.tree_quantize(
        own,
        "int4",
        min_size=0,
        example=x[0],
        stats=eqq.calibrate(fn, own, [x]),
        method=eqq.GPTQ(),
    )
    dense = eqq.tree_dequantize(found)
    np.testing.assert_allclose(fn(found, x), fn(dense, x), rtol=1e-3, atol=1e-3)
    plain = eqq.tree_quantize(own, "int4", min_size=0, example=x[0])
    lost = lambda q: jnp.sum((fn(eqq.tree_dequantize(q), x) - fn(own, x)) ** 2)
    assert lost(found) < 0.5 * lost(plain)


def test_tied(model, stats):
    pair = {"a": model, "b": model}
    both = eqq.calibrate(lambda m, x: fn(m["a"], x), pair, [correlated(0, 100, 32)])
    q = eqq.tree_quantize(pair, "int8", min_size=0, stats=both)
    for a, b in zip(*(jtu.tree_leaves(q[name]) for name in "ab"), strict=True):
        assert a is b


def test_skeleton(model, stats):
    skeleton = eqx.filter_eval_shape(lambda: model)
    q = eqq.tree_quantize(skeleton, "int8", min_size=0, method=eqq.ScaleSearch())
    assert eqq.is_quantized(q.layers[0].weight)


def test_errors(model, stats):
    with pytest.raises(ValueError, match="`method`.*needs.*eqquant.calibrate"):
        eqq.tree_quantize(model, "int4", min_size=0, method=eqq.GPTQ())
    other = {"other": model}
    with pytest.raises(ValueError, match="`stats` should be of this model"):
        eqq.tree_quantize(other, "int4", min_size=0, stats=stats)
    with pytest.raises(ValueError, match="along the axes"):
        eqq.tree_quantize(model, "int4", min_size=0, stats=stats, axis=-2)
    with pytest.raises(ValueError, match="`layers.0.weight`: `method`"):
        eqq.tree_quantize(model, "rsrternary", min_size=0, stats=stats)
    wider = eqx.nn.MLP(64, 16, 48, depth=1, key=jr.key(0))
    with pytest.raises(ValueError, match="`layers.0.weight`: `gram`"):
        eqq.tree_quantize(wider, "int4", min_size=0, stats=stats)


def test_within_jit(model, stats):
    # Weights are traced, and statistics are closed over.
    quantize = lambda model: eqq.tree_quantize(model, "int4", min_size=0, stats=stats)
    jitted = first_layer_error(model, eqx.filter_jit(quantize)(model))
    np.testing.assert_allclose(jitted, first_layer_error(model, quantize(model)), 1e-3)


@pytest.mark.thorough
def test_a_weight_that_is_not_known(model):
    pair = {"a": model, "b": eqx.nn.Linear(32, 16, key=jr.key(1))}
    one = eqq.calibrate(lambda m, x: fn(m["a"], x), pair, [correlated(0, 100, 32)])
    with pytest.warns(UserWarning, match="`b.weight` entered no product.*ScaleSearch"):
        q = eqq.tree_quantize(pair, "int4", min_size=0, stats=one)
    searched = eqq.tree_quantize(pair, "int4", min_size=0, method=eqq.ScaleSearch())
    assert eqx.tree_equal(q["b"], searched["b"])


@pytest.mark.thorough
def test_a_format_that_takes_no_method(model, stats):
    where = lambda m: m.layers[1].weight
    signs = eqx.tree_at(where, model, replace_fn=jnp.sign)
    rules = eqq.Rules([("layers.1.*", "rsrternary"), ("*", "int4")])
    quantize = lambda **kwargs: eqq.tree_quantize(signs, rules, strict=False, **kwargs)
    for kwargs in ({"method": eqq.ScaleSearch()}, {"stats": stats}):
        with pytest.warns(UserWarning, match=r"^`layers.1.weight` is.*nearest") as seen:
            q = quantize(**kwargs)
        assert len(seen) == 1
        assert eqx.tree_equal(q.layers[1], quantize().layers[1])
        alone = eqq.tree_quantize(model, "int4", min_size=0, **kwargs)
        assert eqx.tree_equal(q.layers[0], alone.layers[0])
    # As does a prefix tree. But not if the method would do nothing at all.
    spec = eqx.tree_at(where, jtu.tree_map(lambda _: "int4", model), "rsrternary")
    with pytest.warns(UserWarning, match="nearest"):
        eqq.tree_quantize(signs, spec, method=eqq.HQQ())
    with pytest.raises(ValueError, match="`layers.1.weight`: `method` HQQ.*RSRTernary"):
        only = eqq.Rules([("layers.1.*", "rsrternary")])
        eqq.tree_quantize(signs, only, strict=False, method=eqq.HQQ())


def test_few_rows(model):
    stats = eqq.calibrate(fn, model, [correlated(0, 5, 32)])
    with pytest.warns(UserWarning, match=r"`layers.0.weight` \(and 1 more\) met fewer"):
        q = eqq.tree_quantize(model, "int4", min_size=0, stats=stats)
    assert jnp.all(jnp.isfinite(_dense(q, 0)))


# Whether an axis of size one is contracted makes no difference.
@pytest.mark.examples(1)
@pytest.mark.parametrize("groups, size", [(1, 1), (16, 3)])
def test_axes_of_size_one(groups, size):
    model = eqx.nn.Conv1d(16, 16, size, groups=groups, key=jr.key(0))
    xs = jr.normal(jr.key(1), (5, 16, 20))
    stats = eqq.calibrate(fn, model, [xs])
    gram = stats["weight"]
    assert gram.contracted == ((1,) if groups == 1 else (2,))
    flat = model.weight.reshape(16, -1)
    rows = gram.rows.reshape(-1)
    value = gram.value.reshape(-1, *gram.value.shape[-2:])
    wanted = solved(flat, "int4", eqq.GPTQ(), value, rows, axis=-1).dequantize()
    for kwargs in ({"unsupported": "on_call"}, {"example": xs[0]}):
        q = eqq.tree_quantize(model, "int4", min_size=0, stats=stats, **kwargs)
        assert q.weight.axis == (-2, -1)
        found = q.weight.dequantize()
        np.testing.assert_array_equal(found.reshape(16, -1), wanted)
        np.testing.assert_allclose(fn(q, xs), fn(eqq.tree_dequantize(q), xs), atol=1e-3)


@pytest.mark.examples(1)
@pytest.mark.parametrize("sequential", (False, True))
def test_a_plain_weight_that_is_transposed(sequential):
    params, x = {"w": normal(64, 64)}, normal(80, 64, seed=1)
    fn = lambda p, x: x @ p["w"].T
    if sequential:
        stats = eqq.Sequential(fn, [x])
    else:
        stats = eqq.calibrate(fn, params, [x])
    with pytest.raises(ValueError, match=r"along \(1,\): pass `axis=-1`.*`example="):
        eqq.tree_quantize(params, "int4", stats=stats)
    q = eqq.tree_quantize(params, "int4", stats=stats, axis=-1)["w"]
    told = eqq.tree_quantize(params, "int4", stats=stats, example=(fn, (x,)))["w"]
    assert q.axis == told.axis == -1
    assert eqq.calibrate(fn, params, [x]).contracted("w") == [(1,)]
