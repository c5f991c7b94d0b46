import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Jaxpr

import eqquant as eqq
from eqquant.train import LowPrecision, Stochastic, tree_compute, tree_preround

from ..helpers import each_row, normal
from ..raises import raises
from ..test_layers import all_layers


x, w, ct = normal(24, 48), normal(40, 48, seed=1), normal(24, 40, seed=2)


def low(w, forward="int8", backward=None):
    """A weight (out, in)."""
    return tree_compute(
        {"w": w}, True, forward, backward=backward, min_size=0, axis=-1
    )["w"]


def pullback(x, w, ct, forward="int8", backward=None):
    """The product, and the gradients with respect to inputs and weight."""
    layer = lambda x, w: x @ low(w, forward, backward).mT
    y, of = jax.vjp(layer, x, w)
    return y, *of(ct)


pullback_jit = jax.jit(pullback, static_argnums=(3, 4))


def rounded(a, axis, format="int8"):
    """In float64."""
    a = np.asarray(a, np.float64)
    largest = np.max(np.abs(a), axis=axis, keepdims=True)
    if format == "int8":
        unit = largest / 127
        return np.round(a / unit) * unit
    dtype = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[format]
    unit = largest / float(jnp.finfo(dtype).max)
    return (a / unit).astype(dtype).astype(np.float64) * unit


def assert_near(found, wanted, most=1e-5):
    scale = np.sqrt(np.mean(np.square(wanted)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=most * 10 * scale)


# Straight through the rounding of the operands, whose product is exact.
@pytest.mark.examples(2)
@pytest.mark.parametrize("forward", ["int8", "e4m3"])
@pytest.mark.parametrize("backward", [False, True], ids=["exact", "rounded"])
def test_against_float64(forward, backward):
    formats = {"int8": eqq.Int8(), "e4m3": eqq.FP8(), "e5m2": eqq.FP8("e5m2")}
    name = "int8" if forward == "int8" else "e5m2"
    found = pullback_jit(
        x, w, ct, formats[forward], formats[name] if backward else None
    )
    qx, qw = (rounded(a, -1, forward) for a in (x, w))
    wide = np.asarray(ct, np.float64)
    to_x = to_w = wide
    if backward:
        # Cotangents are rounded together with the scales that they meet.
        of_x, of_w = (np.max(np.abs(a), -1) for a in (x, w))
        to_x = rounded(wide * of_w, -1, name) / of_w
        to_w = rounded(wide * of_x[:, None], 0, name) / of_x[:, None]
    assert_near(found[0], qx @ qw.T)
    assert_near(found[1], to_x @ qw)
    assert_near(found[2], to_w.T @ qx)


def products(fn, *args):
    """The dtypes of what the products of a program multiply, and of their results."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    line = re.compile(
        r"dot_general .*: \(tensor<.*x(\w+)>, tensor<.*x(\w+)>\) -> .*x(\w+)>"
    )
    return sorted(line.findall(text))


def test_the_program_multiplies_8_bits():
    def of(forward, backward):
        return products(lambda *a: pullback(*a, forward, backward), x, w, ct)

    assert of("int8", Stochastic("int8")) == [("i8", "i8", "i32")] * 3
    assert (
        of("int8", ("int8", None))
        == [("f32", "f32", "f32")] + [("i8", "i8", "i32")] * 2
    )
    assert of(eqq.FP8(), eqq.FP8("e5m2")) == [
        ("f8E4M3FN", "f8E4M3FN", "f32"),
        *[("f8E5M2", "f8E4M3FN", "f32")] * 2,
    ]
    assert of("int8", jnp.bfloat16)[:2] == [("bf16", "bf16", "f32")] * 2
    # Blocks have scales within what is contracted, and floats no integer products.
    assert of("mxfp8", eqq.MXFP8("e5m2")) == [("f32", "f32", "f32")] * 3
    assert of("int8", eqq.FP8("e5m2"))[:2] == [("f32", "f32", "f32")] * 2


# What XLA makes of it. (Of a loss and its gradient of a model, by `jax.vmap`.)
@pytest.mark.optimized
def test_the_compiled_program_multiplies_8_bits():
    model = low(w, backward=Stochastic("int8"))
    loss = lambda m, x: jnp.sum(jax.vmap(lambda x: m @ x)(x) ** 2)
    program = jax.jit(jax.grad(loss, (0, 1))).lower(model, jnp.asarray(x)).compile()
    # The library takes them as 8-bit inputs.
    library = r"target=\"eqquant_\w+\", operand_layout_constraints=\{s8\["
    integers = rf"= s32\[[\d,]*\]\S* dot\(|{library}"
    assert len(re.findall(integers, program.as_text())) == 3


formats = {
    "int8": ("int8", "int8"),
    "fp8": (eqq.FP8(), eqq.FP8("e5m2")),
    "fp8-tensor": (eqq.FP8(scale="tensor"), eqq.FP8("e5m2", scale="tensor")),
    "mx": ("mxfp8", eqq.MXFP8("e5m2")),
}
errors = dict(zip(formats, (0.02, 0.1, 0.1, 0.15)))


# Near the product in float32, and of the same values under every transformation.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", formats)
def test_transformations(name):
    def relative(a, b):
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    wanted = x @ w.T, ct @ w, ct.T @ x

    @jax.jit
    def everything(x, w, ct):
        plain = pullback(x, w, ct, *formats[name])
        by_row = jax.vjp(
            jax.vmap(lambda x, w: low(w, *formats[name]) @ x, (0, None)), x, w
        )
        mapped = by_row[0], *by_row[1](ct)
        stack = lambda a: jnp.stack([a, 2 * a])
        of_each = jax.vmap(lambda *a: pullback(*a, *formats[name]))
        experts = of_each(*map(stack, (x, w, ct)))
        layers = lambda x, w: stack(x) @ low(stack(w), *formats[name]).mT
        y, pull = jax.vjp(layers, x, w)
        forward, backward = formats[name]
        random = pullback(x, w, ct, forward, Stochastic(backward))
        return plain, random, mapped, experts, (y, *pull(stack(ct)))

    plain, random, mapped, experts, layers = everything(x, w, ct)
    for near, other, exact in zip(plain, random, wanted, strict=True):
        assert 0 < relative(near, exact) < errors[name]
        assert relative(near, exact) <= relative(other, exact) < 2 * errors[name]
    if name != "fp8-tensor":  # There a row is a tensor, under `vmap`.
        for a, b in zip(plain, mapped, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(plain, experts, strict=True):
        np.testing.assert_allclose(a, b[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layers[0][0], plain[0], rtol=1e-5, atol=1e-5)
    assert relative(layers[1], 9 * wanted[1]) < errors[name]


def test_derivatives():
    m = low(jnp.asarray(w), backward=Stochastic("int8"))
    f = lambda m, x: jnp.sum(jnp.tanh(x @ m.mT) ** 2)
    dense = lambda x: f(jnp.asarray(w), x)
    v = jnp.asarray(normal(24, 48, seed=5))

    @jax.jit
    def both(x):
        _, forward = jax.jvp(lambda x: f(m, x), (x,), (v,))
        backward = jnp.vdot(jax.grad(lambda x: f(m, x))(x), v)
        hvp = [jax.jvp(jax.grad(g), (x,), (v,))[1] for g in (lambda x: f(m, x), dense)]
        each = jax.vmap(jax.grad(lambda m, x: f(m, x[None])), (None, 0))(m, x)
        return forward, backward, *hvp, each.weight

    forward, backward, hvp, wanted, each = both(jnp.asarray(x))
    np.testing.assert_allclose(forward, backward, rtol=0.05)
    assert np.linalg.norm(hvp - wanted) < 0.3 * np.linalg.norm(wanted)
    assert each.shape == (24, 40, 48)


# The mean is the number, and nothing but its two neighbours occurs.
@pytest.mark.examples(1)
@pytest.mark.parametrize("format", [eqq.Int8(), eqq.FP8("e5m2"), eqq.NVFP4()])
def test_stochastic_rounding(format):
    from eqquant.train._low_precision._operand import rounded as rounded_at

    row = jnp.asarray(normal(64))
    # (Differences of each copy, which are far below its rounding.)
    rows = row[None] * (1 + 1e-6 * jnp.arange(4000.0)[:, None] / 4000)
    found = np.asarray(jax.jit(lambda a: rounded_at(a, Stochastic(format)))(rows))
    nearest = np.asarray(rounded_at(rows[:1], format))[0]
    row = np.asarray(row)
    steps = np.diff(np.sort(found, axis=0), axis=0)
    assert np.all(np.sum(steps > 1e-4, axis=0) <= 1)
    rms = lambda a: np.sqrt(np.mean(np.square(a)))
    assert 0 < rms(found.mean(0) - row) < 0.1 * rms(nearest - row)
    # As jitted, so eagerly; and other numbers are rounded otherwise.
    np.testing.assert_allclose(rounded_at(rows, Stochastic(format)), found, rtol=1e-6)
    other = rounded_at(rows.at[0, 0].multiply(0.999), Stochastic(format))
    assert 0.1 < np.mean(np.asarray(other[1:]) != found[1:])


class Net(eqx.Module):
    layers: eqx.nn.Linear  # a stack

    def __call__(self, x, wrap=lambda fn: fn):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        step = lambda x, a: (jnp.tanh(eqx.combine(a, static)(x)), None)
        return lax.scan(wrap(step), x, arrays)[0]


make = eqx.filter_vmap(lambda key: eqx.nn.Linear(48, 48, key=key))
net = Net(make(jr.split(jr.key(0), 3)))


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if isinstance(inner, Jaxpr):
                    yield from equations(inner)


# Once in the forward pass, and not again to recompute it.
def test_weights_are_rounded_once():
    model = tree_compute(net, backward="int8")
    assert isinstance(model.layers.weight, LowPrecision)

    def roundings(wrap, before=lambda m: m):
        def loss(m):
            y = jax.vmap(lambda x: before(m)(x, wrap))(jnp.asarray(x))
            return jnp.sum(y**2)

        program = jax.make_jaxpr(jax.value_and_grad(loss))(model)
        sizes = [
            eqn.outvars[0].aval.size
            for eqn in equations(program.jaxpr)
            if eqn.primitive.name == "round"
        ]
        return sizes.count(48 * 48) + sizes.count(3 * 48 * 48)

    policy = jax.checkpoint_policies.save_only_these_names("eqquant_weights")
    assert roundings(lambda fn: fn) == 1
    assert roundings(jax.checkpoint) == 2
    assert roundings(jax.checkpoint, tree_preround) == 1
    assert roundings(lambda fn: jax.checkpoint(fn, policy=policy)) == 1

    def gradient(wrap, before):
        loss = lambda m: jnp.sum(jax.vmap(lambda x: before(m)(x, wrap))(x) ** 2)
        return eqx.filter_jit(eqx.filter_grad(loss))(model)

    wanted = gradient(lambda fn: fn, lambda m: m)
    for before in (lambda m: m, tree_preround):
        found = gradient(jax.checkpoint, before)
        assert jtu.tree_structure(found) == jtu.tree_structure(wanted)
        for a, b in zip(*map(jtu.tree_leaves, (found, wanted)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# An ordinary loop, with accumulated gradients and donated buffers.
def test_training():
    optimizer = optax.MultiSteps(optax.adam(1e-2), 2)
    target = jnp.asarray(normal(24, 48, seed=7))

    def train(model):
        model = jtu.tree_map(lambda a: a.copy() if eqx.is_array(a) else a, model)
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

        @eqx.filter_jit(donate="all")
        def step(model, state):
            loss = lambda m: jnp.mean((jax.vmap(m)(x) - target) ** 2)
            value, gradients = eqx.filter_value_and_grad(loss)(model)
            with jax.numpy_dtype_promotion("standard"):
                params = eqx.filter(model, eqx.is_inexact_array)
                updates, state = optimizer.update(gradients, state, params)
            return eqx.apply_updates(model, updates), state, value

        values = []
        for _ in range(12):
            model, state, value = step(model, state)
            values.append(float(value))
        return model, np.array(values)

    _, dense = train(net)
    model, values = train(tree_compute(net, backward=Stochastic("int8")))
    np.testing.assert_allclose(values, dense, rtol=0.01)
    assert values[-1] < 0.97 * values[0]
    # What comes out is a model of ordinary arrays, or a quantized one.
    plain = tree_compute(model, forward=None)
    assert jtu.tree_structure(plain) == jtu.tree_structure(net)
    assert plain.layers.weight is model.layers.weight.weight
    frozen = eqq.train.tree_freeze(model)
    np.testing.assert_allclose(
        each_row(frozen, x), each_row(model, x), rtol=1e-4, atol=1e-5
    )


# Equinox's layers, whose code knows nothing of this.
@pytest.mark.examples(3)
@all_layers
def test_layers_are_untouched(make, call, number):
    del number
    layer = make()
    model = tree_compute(layer, backward="int8")
    assert type(model) is type(layer)
    data = normal(7, 64)
    y, wanted = eqx.filter_jit(lambda a, b: (call(a, data), call(b, data)))(
        model, layer
    )
    assert y.dtype == wanted.dtype
    assert np.linalg.norm(y - wanted) < 0.03 * np.linalg.norm(wanted)
    is_low = lambda x: isinstance(x, LowPrecision)
    if any(map(is_low, jtu.tree_leaves(model, is_leaf=is_low))):
        assert not np.array_equal(y, wanted)


def test_narrow_inputs_and_not_finite():
    y, dx, dw = pullback(
        *[jnp.asarray(a, jnp.bfloat16) for a in (x, w, ct)], "int8", Stochastic("int8")
    )
    assert {a.dtype.name for a in (y, dx, dw)} == {"bfloat16"}
    assert_near(np.asarray(y, np.float64), x @ w.T, 6e-3)
    mixed = jnp.asarray(x, jnp.bfloat16) @ low(jnp.asarray(w)).mT
    assert mixed.dtype == jnp.bfloat16
    ints = jnp.arange(48) @ low(jnp.asarray(w)).mT
    assert ints.dtype == jnp.float32
    spoiled = x.at[3, 4].set(np.inf)
    y, dx, dw = pullback(spoiled, w, ct, "int8", "int8")
    assert np.all(np.isnan(y[3])) and np.all(np.isfinite(np.delete(y, 3, 0)))
    assert np.all(np.isnan(dw))


def test_disabled_jit():
    with jax.disable_jit():
        found = pullback(x, w, ct, "int8", "int8")
    for a, b in zip(found, pullback_jit(x, w, ct, "int8", "int8"), strict=True):
        assert_near(a, b)


# More than a sum in 32 bits holds.
def test_many_rows():
    rows = 140_000
    ones, w = jnp.ones((rows, 16)), jnp.ones((16, 16))
    _, _, dw = pullback_jit(ones, w, ones, "int8", "int8")
    np.testing.assert_allclose(dw, rows, rtol=1e-5)


# What has a way of its own to be multiplied keeps it. (Adapters: `test_lora_compute`.)
def test_quantized_weights_are_left_alone():
    model = {"w": jnp.asarray(w), "v": eqq.quantize(w, "int8", axis=-1)}
    found = tree_compute(model, min_size=0)
    assert isinstance(found["w"], LowPrecision) and found["v"] == model["v"]


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    model = {"w": jnp.asarray(w)}
    with raises(ValueError, "forward", "RSRBinary"):
        tree_compute(model, forward="rsrbinary", min_size=0)
    with raises(TypeError, "forward", "a format such as", "Got 3"):
        tree_compute(model, forward=3)
    with raises(ValueError, "backward", "3"):
        tree_compute(model, backward=("int8", "int8", None))
    with raises(ValueError, "backward", "int32"):
        tree_compute(model, backward=jnp.int32)
    with raises(TypeError, "backward", "0.5"):
        tree_compute(model, backward=0.5)
    with raises(ValueError, "format", "stochastic"):
        Stochastic("q4_1")
    with pytest.raises(ValueError, match="complex64"):
        x.astype(jnp.complex64) @ low(w).mT
    with pytest.raises(ValueError, match=r"Got shapes \(24, 40\) and \(48, 40\)"):
        ct @ low(jnp.asarray(w)).mT
