import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant.train import learned_step_size, straight_through

from ..helpers import formats, main_formats, normal
from .reference import each_block, learned


def last(format):
    match format:
        case eqq.Nested():
            return last(format.base)
        case eqq.Int8():
            return 127
        case eqq.Int4():
            return 7 if format.symmetric else 15
        case _:
            return 1


def is_absmax(format):
    return isinstance(format, eqq.NF4 | eqq.Int8 | eqq.Dynamic8) or format == eqq.Int4()


# Of formats whose codes go by the scale that they are given, and to the last bit.
to_learn = pytest.mark.parametrize(
    "format",
    [
        pytest.param(formats[name], id=name)
        for name in ("nf4", "int8", "int8-32", "int4", "int4-affine", "ternary")
        + ("ternary-tensor", "binary-128", "dynamic8")
    ],
)


# With scales that are too small for some of the numbers, and for none.
@pytest.mark.examples(1)
@to_learn
@pytest.mark.parametrize("factor", (0.6, 1.3))
def test_definition(format, factor):
    w, c, v = (normal(6, 130, seed=i) for i in range(3))
    scale = factor * eqq.quantize(w, format, axis=-1).scale
    fn = lambda w, scale: learned_step_size(w, scale, format, axis=-1)
    y, pull = jax.vjp(fn, w, scale)
    of_w, of_scale = pull(c)

    wide, each = np.asarray(w, np.float64), np.asarray(scale, np.float64).reshape(-1)
    value, slope, inside = learned(wide, each, format, last(format))
    assert inside.all() == (factor > 1 and is_absmax(format))
    np.testing.assert_allclose(y, value, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(of_w, np.where(inside, c, 0))
    sums = [part.sum() for (part,) in each_block(format, slope * np.asarray(c))]
    np.testing.assert_allclose(of_scale.reshape(-1), sums, rtol=1e-4, atol=1e-4)

    # Forwards: along `v`, and the scales themselves.
    _, tangent = jax.jvp(fn, (w, scale), (v, scale))
    spread = np.zeros(wide.shape)
    for (part,), size in zip(each_block(format, spread), each, strict=True):
        part[...] = size
    expected = np.where(inside, v, 0) + slope * spread
    np.testing.assert_allclose(tangent, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.examples(2)
@main_formats
def test_starts_as_the_format_does(format):
    w = normal(70, 5)
    scale = eqq.quantize(w, format).scale
    got = learned_step_size(w, scale, format)
    np.testing.assert_allclose(got, straight_through(w, format), rtol=1e-2, atol=1e-2)


# Of a number that becomes `p * s`, only through `p - u`, where `s` may be anything.
def test_by_hand():
    w = jnp.array([[0.3, -0.9, 1.7, 0.0]])
    scale = jnp.array([[0.5]])
    fn = lambda s: learned_step_size(w, s, eqq.Ternary(), axis=-1)
    np.testing.assert_allclose(fn(scale), [[0.5, -0.5, 0.5, 0.0]])
    _, tangent = jax.jvp(fn, (scale,), (jnp.ones((1, 1)),))
    # 0.3 is inside, 0.6 of a step: 1 - 0.6. The square root of four numbers.
    np.testing.assert_allclose(tangent, [[0.4 / 2, -1 / 2, 1 / 2, 0]], rtol=1e-6)
    # A step size that was trained past zero counts as its absolute value.
    assert np.array_equal(fn(-scale), fn(scale))
    _, back = jax.jvp(fn, (-scale,), (jnp.ones((1, 1)),))
    np.testing.assert_allclose(back, -tangent, rtol=1e-6)


def test_it_learns():
    # From a scale that is far off to about the best one, of ternary codes: 7.2 dB.
    w = normal(1, 4096)
    fn = lambda s: jnp.mean((learned_step_size(w, s, "ternary", axis=-1) - w) ** 2)
    scale = jnp.array([[0.2]])
    step = jax.jit(lambda s: s - 20 * jax.grad(fn)(s))
    for _ in range(200):
        scale = step(scale)
    assert 10 * np.log10(1 / fn(scale)) > 6.9


def test_dtypes_and_transformations():
    w, scale = normal(3, 70, 5, dtype=jnp.bfloat16), jnp.full((3, 5, 2), 0.2)
    fn = lambda w, scale: learned_step_size(w, scale, "int4")
    y, pull = jax.vjp(fn, w, scale)
    of_w, of_scale = pull(y)
    assert y.dtype == of_w.dtype == jnp.bfloat16 and of_scale.dtype == jnp.float32
    mapped = jax.vmap(fn)(w, scale)
    assert np.array_equal(mapped, y)
    assert np.array_equal(jax.jit(fn)(w, scale), y)


def test_explicit_mesh():
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Explicit,))
    w, scale = normal(64, 64), jnp.abs(normal(64, 1, seed=1))
    place = lambda a: jax.device_put(a, NamedSharding(mesh, P("rows", None)))

    @jax.value_and_grad
    def loss(both):
        return jnp.sum(jnp.sin(learned_step_size(*both, "nf4", axis=-1)))

    expected = loss((w, scale))
    with jax.set_mesh(mesh):
        found = loss((place(w), place(scale)))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_errors():
    w = normal(70, 5)
    with pytest.raises(
        ValueError, match=r"`scale` should have shape \(5, 2\).*\(1, 2\)"
    ):
        learned_step_size(w, jnp.ones((1, 2)), "int4")
    with pytest.raises(TypeError, match="`scale` should be a JAX array. Got float"):
        learned_step_size(w, 1.0, "int4")
    with pytest.raises(ValueError, match="`format` should be one that rounds"):
        learned_step_size(w, jnp.ones((1, 2)), eqq.RSRTernary())


# Such as the last projection of many blocks. The first scales are zero, too.
@pytest.mark.examples(1)
@pytest.mark.parametrize("format", (eqq.Int4(64), eqq.Int8()))
def test_zeros_are_trained(format):
    layer = eqx.nn.Linear(64, 64, use_bias=False, key=jr.key(0))
    layer = eqx.tree_at(lambda layer: layer.weight, layer, jnp.zeros((64, 64)))
    x, y = normal(256, 64), normal(256, 64) @ normal(64, 64, seed=1) / 8

    def trained(**options):
        model = eqq.train.tree_fake_quantize(layer, format, **options)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        optimizer = optax.adam(1e-2)

        def loss(params):
            return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

        def step(carry, _):
            params, state = carry
            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state)
            return (optax.apply_updates(params, updates), state), value

        with jax.numpy_dtype_promotion("standard"):
            carry = params, optimizer.init(params)
            return jax.jit(lambda: jax.lax.scan(step, carry, None, 300)[1])()

    plain, learned = trained(), trained(step_sizes=True)
    assert plain[0] == learned[0] and plain[-1] < 0.05 * plain[0]
    assert learned[-1] < 2 * plain[-1] + 0.02 * plain[0]
