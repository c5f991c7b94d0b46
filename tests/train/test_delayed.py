import io

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import eqquant as eqq
from eqquant.train import (
    Delayed,
    DotGeneral,
    Stochastic,
    tree_compute,
    tree_preround,
    update_delayed,
)

from ..helpers import normal
from ..raises import raises
from ..sharding.meshes import mesh, put


e4m3, e5m2 = (eqq.FP8(dtype, scale="tensor") for dtype in ("e4m3", "e5m2"))
both = dict(forward=Delayed(e4m3, 2), backward=Delayed(e5m2, 2))
x, w, ct = normal(24, 48), normal(40, 48, seed=1), normal(24, 40, seed=2)


def low(w, axis=-1, **kwargs):
    return tree_compute({"w": jnp.asarray(w)}, axis=axis, min_size=0, **kwargs)


class Recipe:
    """The scales of one operand, as Transformer Engine makes them: `2 ** floor(log2(fp8
    max / amax))`, of the largest in the history; and how many numbers saturated."""

    def __init__(self, dtype, history=2):
        self.dtype, self.seen, self.history = dtype, [], history
        self.most = float(jnp.finfo(dtype).max)

    def __call__(self, a):
        a = np.asarray(a, np.float64)
        amax = max(self.seen[-self.history :], default=np.max(np.abs(a)))
        scale = 2 ** np.floor(np.log2(self.most / amax))
        self.saturated = np.sum(np.abs(a * scale) > self.most)
        self.seen.append(np.max(np.abs(a)))
        clipped = np.clip(a * scale, -self.most, self.most)
        return clipped.astype(self.dtype).astype(np.float64) / scale


def pullback(model, x, ct):
    """The product, the model after a step, and both gradients."""
    y, of = eqx.filter_vjp(lambda model, x: x @ model["w"].mT, model, x)
    grads, dx = of(ct)
    model, grads = update_delayed(model, grads)
    return model, (y, dx, grads["w"].weight)


def assert_near(found, wanted, most=1e-5):
    for a, b in zip(found, wanted, strict=True):
        scale = np.sqrt(np.mean(np.square(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=most * scale)


def left(model):
    """The bins that count, and for how long."""
    return [
        {int(i): int(steps[i]) for i in np.flatnonzero(steps)}
        for steps in model["w"].history.steps
    ]


# Over steps of which some exceed what came before, and after which the largest values
# are forgotten.
def test_against_the_recipe():
    model, step = low(w, **both), jax.jit(pullback)
    of_x, of_w = Recipe(jnp.float8_e4m3fn), Recipe(jnp.float8_e4m3fn)
    of_ct = Recipe(jnp.float8_e5m2)
    saturated = []
    for size in (1, 1, 5, 0.2, 1, 1e-3, 1e-3, 1e-3):
        of_weight = 0.3 + size
        new = eqx.tree_at(lambda m: m["w"].weight, model, of_weight * w)
        model, found = step(new, size * x, ct / size)
        qx, qw, qct = of_x(size * x), of_w(of_weight * w), of_ct(ct / size)
        assert_near(found, (qx @ qw.T, qct @ qw, qct.T @ qx))
        saturated.append([of_x.saturated, of_w.saturated, of_ct.saturated])
    saturated = np.array(saturated) > 0
    assert not saturated[:2].any() and saturated[2, :2].all()
    assert saturated[3].tolist() == [False, False, True]
    # The last two steps are what is left.
    for found, recipe in zip(left(model), (of_x, of_w, of_ct), strict=True):
        # Each bin reaches 1.75 times a power of two.
        ends = [127 + int(np.ceil(np.log2(a / 1.75))) for a in recipe.seen[-2:]]
        assert found == {ends[0]: 1} | {ends[1]: 2}


def test_what_is_not_finite():
    model, step = low(w, **both), jax.jit(pullback)
    first, _ = step(model, x, ct)
    for wild in (np.inf, -np.inf, np.nan):
        for start in (model, first):
            spoiled = x.at[3, 4].set(wild)
            after, (y, dx, dw) = step(start, spoiled, ct)
            assert np.all(np.isnan(y[3])) and np.all(np.isfinite(np.delete(y, 3, 0)))
            assert np.all(np.isfinite(dx)) and np.all(np.isnan(dw[:, 4]))
            assert np.all(np.isfinite(np.delete(dw, 4, 1)))
            after, (y, *_) = step(after, x, ct)
            assert np.all(np.isfinite(y)) and np.all(
                np.isfinite(step(after, x, ct)[1][0])
            )
    zeros, _ = step(low(0 * w, **both), 0 * x, 0 * ct)
    assert left(zeros) == [{}, {}, {}]


# A scale is each bin's, to the last number of it.
def test_ends_of_bins():
    from eqquant.train._low_precision._history import bin_of, History

    ends = 1.75 * 2.0 ** np.arange(-125, 128).astype(np.float64)
    ends = ends.astype(np.float32)
    above = np.nextafter(ends[:-1], np.float32(np.inf))
    found = jax.jit(jax.vmap(lambda a: bin_of(a[None], 0)))
    np.testing.assert_array_equal(found(ends), 127 + np.arange(-125, 128))
    np.testing.assert_array_equal(found(above), 128 + np.arange(-125, 127))
    most = np.finfo(np.float32).max
    np.testing.assert_array_equal(found(jnp.array([0, most, np.inf])), [0, 255, 0])
    history = History.empty(())
    for format, power in ((e4m3, 8), (e5m2, 15)):
        assert history.scale(1, format) == 0
        seen = jnp.zeros((3, 256)).at[1, [100, 140]].set(0.01)
        after = history.next(seen, (4, 4, 4))
        assert after.scale(0, format) == 0
        assert after.scale(1, format) == 2.0 ** (140 - 127 - power)


class Net(eqx.Module):
    layers: eqx.nn.Linear  # a stack
    last: eqx.nn.Linear

    def __call__(self, x, wrap=lambda fn: fn):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        step = lambda x, a: (jnp.tanh(eqx.combine(a, static)(x)), None)
        x, _ = lax.scan(wrap(step), x, arrays)
        return self.last(jnp.tanh(self.last(x)))  # twice


keys = jr.split(jr.key(0), 3)
make = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))
net = Net(make(keys[:2]), eqx.nn.Linear(16, 16, key=keys[2]))
rows = normal(12, 16)


def loss(model, rows, wrap=lambda fn: fn):
    return jnp.sum(jax.vmap(lambda x: model(x, wrap))(rows) ** 2)


def by_hand(model, rows):
    """The same without `vmap` and `scan`."""
    product = lambda rows, layer, w, b: rows @ w.mT + b[None]
    stack, last = model.layers, model.last
    for i in range(2):
        rows = jnp.tanh(product(rows, stack, stack.weight[i], stack.bias[i]))
    for wrap in (jnp.tanh, lambda y: y):
        rows = wrap(product(rows, last, last.weight, last.bias))
    return jnp.sum(rows**2)


# The same gradients and scales, however a step is put together.
def test_compositions():
    model = tree_compute(net, min_size=0, **both)
    assert model.layers.weight.history.steps.shape == (2, 3, 256)
    update = eqx.filter_jit(update_delayed)

    @eqx.filter_jit
    def grad(loss, model, rows, *wrap):
        return eqx.filter_value_and_grad(loss)(model, rows, *wrap)

    model, zeros = update(model, grad(loss, model, rows)[1])
    assert not np.any(zeros.last.weight.history.seen)
    prerounded = lambda model, *args: loss(tree_preround(model), *args)
    parts = [grad(loss, model, part) for part in (rows[:6], rows[6:])]
    ways = [
        grad(loss, model, rows),
        grad(by_hand, model, rows),
        grad(loss, model, rows, jax.checkpoint),
        grad(prerounded, model, rows, jax.checkpoint),
        jtu.tree_map(lambda a, b: a + b, *parts),
    ]
    updated = [update(model, gradients)[0] for _, gradients in ways]
    (value, wanted), *others = ways
    for other, found in others:
        np.testing.assert_allclose(other, value, rtol=1e-6)
        get = lambda g: jtu.tree_leaves(
            (g.layers.weight.weight, g.last.weight.weight, g.layers.bias, g.last.bias)
        )
        assert_near(get(found), get(wanted))
    # What the last layer sees: two inputs and cotangents of each row, and its weight.
    counted = np.sum(wanted.last.weight.history.seen, -1)
    np.testing.assert_array_equal(counted, [24, 24, 24])
    for one in updated[1:]:
        for name in ("layers", "last"):
            a, b = (getattr(m, name).weight.history for m in (one, updated[0]))
            for operand in range(3):
                np.testing.assert_array_equal(
                    a.scale(operand, e4m3), b.scale(operand, e4m3)
                )


# Data over devices: the largest of all, whether JAX, GSPMD or `shard_map` distributes.
def test_sharded():
    model, _ = jax.jit(pullback)(low(w, **both), x / 2, ct / 2)
    # The last device has the largest numbers.
    size = np.linspace(0.1, 1, 24, dtype=np.float32)[:, None]
    args = size * x, size * ct
    wanted, numbers = jax.jit(pullback)(model, *args)

    def check(found):
        after, values = found
        np.testing.assert_array_equal(
            after["w"].history.steps[..., 1:] > 0,
            wanted["w"].history.steps[..., 1:] > 0,
        )
        assert_near(values, numbers)

    for kind in ("auto", "explicit"):
        m = mesh(kind, 8)
        with jax.set_mesh(m):
            held = jtu.tree_map(lambda a: put(a, m), model)
            check(jax.jit(pullback)(held, *[put(a, m, "a") for a in args]))
    m = mesh("auto", 8)
    mapped = jax.shard_map(
        pullback,
        mesh=m,
        in_specs=(P(), P("a"), P("a")),
        out_specs=(P(), (P("a"), P("a"), P())),
    )
    after, values = jax.jit(mapped)(model, *args)
    highest = lambda m: [m["w"].history.scale(i, e4m3) for i in range(3)]
    assert highest(after) == highest(wanted)
    assert_near(values, numbers)


def everything_of(dense, optimizer, first):
    """A training in which the history is updated before, or after, the optimizer."""
    target = normal(12, 16, seed=7)

    @eqx.filter_jit
    def step(model, state):
        mean = lambda m: jnp.mean((jax.vmap(m)(rows) - target) ** 2)
        grads = eqx.filter_grad(mean)(model)
        if first:
            model, grads = update_delayed(model, grads)
        with jax.numpy_dtype_promotion("standard"):
            params = eqx.filter(model, eqx.is_inexact_array)
            updates, state = optimizer.update(grads, state, params)
        model = eqx.apply_updates(model, updates)
        return model if first else update_delayed(model, grads)[0], state

    model = tree_compute(dense, min_size=0, **both)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(4):
        model, state = step(model, state)
    return model


# No optimizer changes what is kept, in whatever order. A norm of gradients is right in
# the order of the example.
def test_optimizers():
    with jax.numpy_dtype_promotion("standard"):
        adamw = optax.MultiSteps(optax.adamw(1e-2, weight_decay=0.3), 2)
    model, other = (everything_of(net, adamw, first) for first in (True, False))
    for a, b in ((model.layers, other.layers), (model.last, other.last)):
        np.testing.assert_array_equal(a.weight.history.steps, b.weight.history.steps)
        np.testing.assert_array_equal(a.weight.weight, b.weight.weight)
    assert not np.any(model.last.weight.history.seen)
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    a, b = (everything_of(net.last, clipped, first) for first in (True, False))
    plain = tree_compute(a, forward=None)
    assert jtu.tree_structure(plain) == jtu.tree_structure(net.last)
    moved = lambda m: np.linalg.norm(m.weight.weight - net.last.weight)
    assert moved(a) > 2 * moved(b) > 0
    # The history is an array like others, in files and in packed models.
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    read = eqx.tree_deserialise_leaves(file, tree_compute(net, min_size=0, **both))
    np.testing.assert_array_equal(
        read.last.weight.history.steps, model.last.weight.history.steps
    )
    frozen = eqq.train.tree_freeze(model).last.weight
    assert frozen.format == e4m3 and frozen.activation == eqq.FP8()
    half = model.last.weight.astype(jnp.bfloat16)
    assert half.history == model.last.weight.history


def test_forward_mode():
    model, _ = jax.jit(pullback)(low(w, **both), x, ct)

    @jax.jit
    def everything(x, model):
        product = lambda x, model: x @ model["w"].mT
        _, along = jax.jvp(lambda x: product(x, model), (x,), (2 * x,))
        params, static = eqx.partition(model, eqx.is_inexact_array)
        tangents = jtu.tree_map(lambda a: 3 * jnp.ones_like(a), params)
        spread = lambda params: product(x, eqx.combine(params, static))
        return along, *jax.jvp(spread, (params,), (tangents,))

    along, y, spread = everything(x, model)
    qx, qw = Recipe(jnp.float8_e4m3fn)(x), Recipe(jnp.float8_e4m3fn)(w)
    wanted = 2 * x @ qw.T, qx @ qw.T, qx @ (3 * np.ones(w.shape)).T
    assert_near((along, y, spread), wanted)


# At random, to the two neighbours among the numbers of the delayed scale.
def test_stochastic():
    model = low(np.eye(64, dtype=np.float32), backward=Delayed(Stochastic(e5m2), 2))
    one = np.full((1, 64), 1.5, np.float32)
    model, _ = jax.jit(pullback)(model, one, one)
    # Larger than what was seen, as its bin has room for.
    ct = np.linspace(0.2, 1.7, 64)[None] * (1 + 1e-6 * np.arange(400)[:, None] / 400)
    ct = ct.astype(np.float32)
    _, (_, dx, _) = jax.jit(pullback)(model, np.ones_like(ct), ct)
    dx, ct = np.asarray(dx, np.float64), np.asarray(ct, np.float64)
    power = 2.0 ** np.floor(np.log2(ct))
    below = np.floor(ct / power * 4) / 4 * power
    assert np.all(np.isclose(dx, below) | np.isclose(dx, below + power / 4))
    error = np.abs(dx.mean(0) - ct.mean(0)) / power[0]
    assert 0 < np.max(error) < 0.06


# A history for what is a stack in the model, and one for all where it is not.
def test_any_dimensions():
    heads, experts = normal(8, 3, 4), normal(2, 4, 8, seed=1)
    a, b = normal(6, 8, seed=2), normal(2, 6, 8, seed=3)
    fn = {
        "heads": lambda w: jnp.einsum("td,dhe->hte", a, w),
        "experts": lambda w: jnp.einsum("gtd,god->tgo", b, w),
        "one of them": lambda w: jnp.einsum("td,od->to", a, w[1]),
    }
    weights = {"heads": (heads, -3), "experts": (experts, -1)}
    weights["one of them"] = weights["experts"]
    for name, (w, axis) in weights.items():
        model = low(w, axis, **both)

        def loss(model, name=name):
            return jnp.sum(eqq.implicit(fn[name])(tree_preround(model)["w"]))

        found = jax.jit(
            lambda m, loss=loss: update_delayed(m, eqx.filter_grad(loss)(m))
        )(model)[0]["w"].history
        assert found.steps.shape == ((2,) if axis == -1 else ()) + (3, 256)
        qw = found.scale(1, e4m3)
        of_each = {"heads": [w], "experts": list(w), "one of them": 2 * [w[1]]}
        wanted = [2 ** np.ceil(np.log2(np.max(np.abs(p)) / 448)) for p in of_each[name]]
        np.testing.assert_array_equal(qw.reshape(-1), wanted)


def test_bad_input():
    model = {"w": jnp.asarray(w)}
    with raises(ValueError, "format", "FP8", "Int8"):
        Delayed("int8")
    with raises(ValueError, "format", "tensor", "FP8()"):
        Delayed(eqq.FP8())
    with raises(ValueError, "format", "MXFP8"):
        Delayed(Stochastic("mxfp8"))
    with raises(ValueError, "scale_dtype", "float16"):
        Delayed(eqq.FP8(scale="tensor", scale_dtype=jnp.float16))
    for history in (0, -1, True):
        with raises(ValueError, "history", str(history)):
            Delayed(e4m3, history)
    with raises(ValueError, "forward", "Stochastic"):
        tree_compute(model, forward=Delayed(Stochastic(e4m3)))
    with raises(ValueError, "backward", "history", "3"):
        tree_compute(model, backward=(Delayed(e5m2), Delayed(e5m2, 3)))
    with raises(ValueError, "Delayed", "weight"):
        DotGeneral(backward=Delayed(e5m2))
    with raises(ValueError, "grads", "model", "structure", "other"):
        update_delayed(tree_compute(net, min_size=0, **both), {"other": 1})
    conv = eqx.nn.Conv1d(4, 16, 3, key=keys[0])
    low_conv = tree_compute(conv, min_size=0, unsupported="on_call", **both)
    with raises(ValueError, "Delayed", "filter_spec"):
        low_conv(normal(4, 12))
    # A model without delayed scales is as it was.
    other, grads = update_delayed(model, {"w": None})
    assert other == model and grads == {"w": None}
