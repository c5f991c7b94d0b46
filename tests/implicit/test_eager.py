import contextlib
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqquant as eqq
from eqquant import implicit

from ..helpers import normal
from .same import assert_close, assert_same_gradient


# Outside of `jit`, too, nothing is compiled twice, and nothing is kept.

x = normal(3, 64, seed=1)


def stack():
    return eqq.quantize(normal(4, 64, 64) / 8, "int8")


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


sine.defjvp(lambda primals, tangents: (sine(*primals), tangents[0]))


def own_derivative(x, w):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(
        lambda x, w: (product(x, w), w), lambda w, g: (g @ w.T, jnp.zeros_like(w))
    )
    return product(x, w[0])


def mapped_over_devices(x, w):
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,))
    fn = lambda x, w: jnp.tanh(x @ w[0])
    specs = P(), P(None, None, "i")
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(None, "i"))(x, w)


def constants(x, w):
    inner = jax.jit(lambda x: lax.cond(x[0, 0] > 0, lambda: x * s, lambda: x + s))
    s = jnp.full((3, 64), 2.0)
    return inner(x) @ w[0]


# Each makes the functions that it gives to JAX anew.
programs = {
    "scan": lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0],
    "map": lambda x, w: lax.map(lambda w: x @ w, w),
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w[0], lambda: x @ w[1]),
    "switch": lambda x, w: lax.switch(
        jnp.asarray(2), [lambda: x @ w[0], lambda: x @ w[1], lambda: x]
    ),
    "while": lambda x, w: lax.while_loop(
        lambda y: jnp.sum(y) < 1e3, lambda y: y + 1 + jnp.abs(y @ w[0]), x
    ),
    "fori_loop": lambda x, w: lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ w[i]), x),
    "jit": lambda x, w: jax.jit(lambda x, w: x @ w[0])(x, w),
    "jit-in-jit": lambda x, w: jax.jit(
        lambda x, w: jax.jit(lambda x: jnp.sin(x))(x) @ w[0]
    )(x, w),
    "vmap": lambda x, w: jax.vmap(lambda w: jax.jit(lambda w: x @ w)(w))(w),
    "checkpoint": lambda x, w: jax.checkpoint(
        lambda x, w: jnp.sin(x @ w[0]),
        policy=jax.checkpoint_policies.save_only_these_names("y"),
    )(x, w),
    "gradient": lambda x, w: jax.grad(
        lambda x: jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w[0]))
    )(x),
    "gradient-of-scan": lambda x, w: jax.grad(
        lambda x: jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])
    )(x),
    "custom_jvp": lambda x, w: lax.map(lambda w: sine(jax.nn.gelu(x @ w)), w),
    "custom_vjp": own_derivative,
    "shard_map": mapped_over_devices,
    "einsum": lambda x, w: jnp.einsum("bi,eio->beo", jax.nn.silu(x), w),
    "ragged_dot": lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 0, 1, 1])),
    "conv": lambda x, w: lax.conv_general_dilated(
        x[None],
        w.transpose(1, 2, 0),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "IOW", "NWC"),
    ),
    "constants": constants,
    "no-weights": lambda x, w: (lax.fori_loop(0, 3, lambda i, y: y * 2, x), w[0]),
}
every_program = pytest.mark.parametrize("name", programs)

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: compiled.append(event)
)


@contextlib.contextmanager
def nothing_is_compiled():
    compiled.clear()
    yield
    assert [event for event in compiled if "backend_compile" in event] == []


@pytest.mark.examples(6)
@every_program
def test_second_call_compiles_nothing(name):
    fn, q, other = programs[name], stack(), 2 * x
    y = implicit(fn)(x, q)
    with nothing_is_compiled():
        again = implicit(fn)(x, q)
        # Neither do other numbers.
        implicit(fn)(other, jax.tree.map(lambda a: a, q))
    assert_close(y, again)
    dense = fn(x, q.dequantize())
    assert_close(eqq.tree_dequantize(y), dense, 1e-3)


def closed_over(fn, constant):
    inner = jax.jit(lambda x: x + jnp.sum(constant))
    scanned = lambda x: lax.scan(lambda x, _: (x + constant[0, 0], None), x, None, 2)[0]
    return lambda x, w: fn(scanned(inner(x)), w)


# (All programs at once: to collect garbage takes long.)
@pytest.mark.thorough
@pytest.mark.parametrize("compiled", (False, True))
def test_nothing_is_kept(compiled):
    q = stack()

    def call(name, i):
        constant = jnp.full((512, 64), float(i))
        fn = implicit(closed_over(programs[name], constant))
        return jax.block_until_ready((jax.jit(fn) if compiled else fn)(x, q))

    def kept():
        gc.collect()
        return len(jax.live_arrays())

    for name in programs:
        call(name, 0)
    before = kept()
    for name in programs:
        for i in range(1 if compiled else 3):
            call(name, i)
    assert kept() <= before


# The program that a first call compiles is kept, without the equation it was made of.
def test_first_call_keeps_no_constant():
    def called():
        constant = jnp.full((3, 64), 0.5)
        fn = lambda x, w: jax.jit(lambda x, w: jnp.cosh(x + constant) @ w[0])(x, w)
        implicit(fn)(x, stack())
        return weakref.ref(constant)

    constant = called()
    gc.collect()
    assert constant() is None


def test_constants_are_those_of_each_call():
    q = stack()

    def fn(value, number):
        constant = jnp.full((3, 64), value)
        inner = jax.jit(lambda x: constant * x + number)
        return lambda x, w: jax.jit(lambda x, w: inner(x) @ w[0])(x, w)

    def expected(value, number):
        return (value * x + number) @ q[0]

    for value, number in ((1.0, 1.0), (2.0, 1.0), (2.0, 3.0), (1.0, 1.0)):
        assert_close(implicit(fn(value, number))(x, q), expected(value, number))
    # Also those that are known only when this runs.
    jitted = jax.jit(lambda value: implicit(fn(value, 1.0))(x, q))
    assert_close(jitted(3.0), expected(3.0, 1.0))
    gradient = jax.grad(lambda value: jnp.sum(implicit(fn(value, 1.0))(x, q)))(3.0)
    assert_close(gradient, jnp.sum(x @ q[0]), 1e-3)


def test_what_is_said_and_called_stays():
    q, called = stack(), []

    def fn(x, w):
        def step(x, w):
            jax.debug.callback(lambda: called.append(1))
            return x @ w, None

        return lax.scan(step, x, w)[0]

    for number in (4, 8):
        implicit(fn)(x, q)
        jax.effects_barrier()
        assert len(called) == number


def test_programs_that_differ_little():
    q = stack()
    twice = lambda op, number: (
        lambda x, w: jax.jit(lambda x, w: op(x @ w[number]))(x, w)
    )
    for op in (jnp.sin, jnp.cos, lambda y: y * 2.0, lambda y: y * 3.0, lambda y: y.T):
        for number in (0, 1):
            expected = op(x @ q[number])
            assert_close(implicit(twice(op, number))(x, q), expected)
    # Of the same shapes, with the operands in another order.
    first = jax.jit(lambda a, b, w: (a - b) @ w[0])
    for fn in (lambda a, w: first(a, x, w), lambda a, w: first(x, a, w)):
        assert_close(implicit(fn)(2 * x, q), fn(2 * x, q.dequantize()))


def test_constants_of_derivatives():
    q, constant = stack(), 2 * x

    @jax.custom_jvp
    def scaled(x):
        return jax.jit(lambda x: x * constant)(x)

    @scaled.defjvp
    def _(primals, tangents):
        (x,), (dx,) = primals, tangents
        return scaled(x), jax.jit(lambda dx: dx * constant)(dx)

    @jax.custom_vjp
    def shifted(x):
        return jax.jit(lambda x: x + constant)(x)

    forward = lambda x: (shifted(x), None)
    shifted.defvjp(forward, lambda _, g: (jax.jit(lambda g: g * constant)(g),))
    fn = jax.jit(lambda x, w: jnp.sum(scaled(shifted(x @ w[0]))))
    assert_same_gradient(fn, x, q)
    gradient = jax.grad(fn)
    assert_close(implicit(gradient)(x, q), gradient(x, q.dequantize()), 1e-3)
    assert_close(jax.grad(implicit(fn))(x, q), gradient(x, q.dequantize()), 1e-3)
