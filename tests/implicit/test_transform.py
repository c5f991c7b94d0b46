import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import eqquant as eqq
import eqquant._implicit._table as table
from eqquant import implicit, register_rule

from ..helpers import normal
from .same import assert_close, assert_same, traced_implicit, uses_in


x = normal(5, 64, seed=1)


def matrix(axis=-2):
    return eqq.quantize(normal(64, 48), "int8", axis=axis)


def test_trees_and_static_leaves():
    class Layer(eqx.Module):
        weight: jax.Array | eqq.QuantizedArray
        bias: jax.Array
        activation: object
        name: str = eqx.field(static=True)

        def __call__(self, x, *, scale):
            assert isinstance(scale, float)
            return {"y": self.activation(x @ self.weight + self.bias) * scale}

    q = matrix()
    layer = Layer(q, jnp.ones((1, 48)), jnp.tanh, "layer")
    expected = jnp.tanh(x @ q.dequantize() + 1) * 2
    # The function is a PyTree itself; and so is what is made of it.
    assert_close(implicit(layer)(x, scale=2.0), {"y": expected})
    assert_close(eqx.filter_jit(implicit(layer))(x, scale=2.0), {"y": expected})
    mapped = jax.vmap(lambda x: implicit(layer)(x[None], scale=2.0)["y"][0])(x)
    assert_close(mapped, expected)
    call = implicit(lambda layers, x, f: f(layers[0](x, scale=2.0)["y"]))
    assert_close(call([layer, "text", None], x, jnp.exp), jnp.exp(expected))
    assert call.__name__ == "<lambda>"


# Equinox's warning of such fields is for those who keep them.
def test_mapped_layer():
    layer = eqq.tree_quantize(eqx.nn.Linear(64, 64, key=jax.random.key(0)), "int8")
    x = normal(3, 64)
    np.testing.assert_array_equal(eqq.implicit(jax.vmap(layer))(x), jax.vmap(layer)(x))


def test_methods():
    class Layer(eqx.Module):
        weight: jax.Array | eqq.QuantizedArray

        @implicit
        def __call__(self, x):
            return jnp.einsum("bi,io->bo", x, self.weight)

    layer = Layer(matrix())
    assert_close(layer(x), x @ matrix())
    assert_close(eqx.filter_jit(layer)(x), x @ matrix())
    assert_close(Layer.__call__(layer, x), x @ matrix())


def test_results():
    q = matrix()
    fn = lambda w, y: (w, w.T, [None, "text", 3, jnp.tanh], {"y": y}, w[0])
    same, transposed, static, rest, row = implicit(fn)(q, x)
    assert jtu.tree_all(jtu.tree_map(jnp.array_equal, same, q))
    assert eqq.is_quantized(transposed) and transposed.shape == (48, 64)
    assert static == [None, "text", 3, jnp.tanh]
    assert rest["y"] is x and not eqq.is_quantized(row)
    made = implicit(lambda w: eqq.quantize(w @ w.T, "nf4"))(q)
    assert made.format == eqq.NF4()


def test_without_quantized_arrays():
    assert_close(implicit(jnp.tanh)(x), jnp.tanh(x))
    marker = object()
    assert implicit(lambda a: a)(marker) is marker


def test_closures():
    q, other = matrix(), matrix(axis=-1)
    s = jnp.asarray(3.0)
    assert_close(implicit(lambda w: x @ w * s)(q), x @ q * 3.0)
    # As always, if it is not an argument.
    assert_close(implicit(lambda w: x @ other @ w.T)(q), x @ other @ q.T, 1e-3)

    def loss(s):
        return jnp.sum(jnp.sin(implicit(lambda w: x @ w * s)(q)))

    expected = jax.grad(lambda s: jnp.sum(jnp.sin(x @ q.dequantize() * s)))(0.1)
    assert jnp.allclose(jax.grad(loss)(0.1), expected, rtol=1e-3)


def test_eager_and_numpy():
    q = matrix()
    y = implicit(jnp.matmul)(np.asarray(x), q)
    assert_close(y, x @ q)
    with jax.disable_jit():
        assert_close(implicit(lambda x, w: jnp.tanh(x @ w))(x, q), jnp.tanh(x @ q))


def decoded(fn, *args):
    """What arrays are dequantized for."""
    found = uses_in(traced_implicit(fn, *args))
    return [use.how for use in found if use.kind == "dequantize"]


def test_unused_operands_are_left_alone():
    assert decoded(lambda w: (jnp.exp(w), w)[1], matrix()) == []


def relu_and_more(w):
    # Its own derivative is not that of `w`.
    return jax.nn.relu(w) + w + jax.nn.softplus(w)


def loops(w):
    return lax.fori_loop(0, 3, lambda i, y: y + jax.jit(jnp.sin)(w) * w, jnp.cos(w))


@pytest.mark.parametrize(
    "fn, number",
    [
        (lambda w: jnp.exp(w) + jnp.sin(w) * w + lax.stop_gradient(w), 1),
        (lambda w: jax.jit(jnp.exp)(w) * w, 1),
        (lambda w: jnp.exp(w) + jax.jit(lambda w: jnp.sin(w) * w)(w), 1),
        (lambda w: jax.jit(jnp.exp)(w) + jax.jit(jnp.sin)(w), 1),
        (lambda w: w / jnp.linalg.norm(w, axis=1, keepdims=True), 1),
        (relu_and_more, 1),
        (jax.jit(lambda w: jax.jit(jnp.exp)(w) + jax.jit(lambda w: w + 1.0)(w)), 1),
        # In the loop and before it, for the loop should hold packed codes.
        (loops, 2),
    ],
)
def test_dequantizes_once(fn, number):
    q = matrix()
    assert len(decoded(fn, q)) == number
    assert_close(implicit(fn)(q), fn(q.dequantize()))
    assert_close(jax.jit(implicit(fn))(q), fn(q.dequantize()))


def test_uses():
    class Block(eqx.Module):
        up: eqq.QuantizedArray
        down: eqq.QuantizedArray

        def __call__(self, x, scale):
            x = jax.jit(jnp.matmul)(x, self.up)

            def step(x, _):
                return jnp.tanh(x @ self.down @ self.up), None

            x, _ = jax.lax.scan(step, x, None, length=2)
            return x * jnp.exp(scale)

    block = Block(matrix(), matrix().T)
    scale = eqq.quantize(normal(1, 48), axis=-1)
    found = uses_in(traced_implicit(lambda b, *args: b(*args), block, x, scale))
    kinds = [(use.kind, use.how, use.times) for use in found]
    *products, last = kinds
    assert [(kind, times) for kind, _, times in products] == [
        ("product", 1),
        ("product", 2),
        ("product", 2),
    ]
    assert last == ("dequantize", "exp", 1)
    assert found[-1].nbytes == 4 * 48


def test_on_dequantize(monkeypatch):
    fn = implicit(jax.jit(lambda w: jnp.exp(w)))
    product = implicit(lambda x, w: x @ w)
    q = matrix()
    monkeypatch.setenv("EQQUANT_ON_DEQUANTIZE", "raise")
    with pytest.raises(RuntimeError, match=r"f32\[64,48\].*Int8.*`exp` at .*\.py:\d+"):
        fn(q)
    product(x, q)
    monkeypatch.setenv("EQQUANT_ON_DEQUANTIZE", "warn")
    with pytest.warns(UserWarning, match="is dequantized, 0.0123 MB"):
        fn(q)
    monkeypatch.setenv("EQQUANT_ON_DEQUANTIZE", "allow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(fn(q), jnp.exp(q.dequantize()))
    monkeypatch.setenv("EQQUANT_ON_DEQUANTIZE", "perhaps")
    with pytest.raises(ValueError, match="'allow', 'warn' or 'raise'. Got 'perhaps'"):
        fn(q)


def test_register_rule(monkeypatch):
    monkeypatch.setattr(table, "_rules", {k: [*v] for k, v in table._rules.items()})
    seen = []

    @register_rule("rev")
    def reverse(w, *, dimensions):
        seen.append(dimensions)
        if w.axis == -1 and dimensions == (0,):
            return w.mT.mT
        return NotImplemented

    q = matrix(axis=-1)
    assert eqq.is_quantized(implicit(lambda w: jnp.flip(w, 0))(q))
    flipped = implicit(lambda w: jnp.flip(w, 1))(q)
    assert_close(flipped, jnp.flip(q.dequantize(), 1))
    assert seen == [(0,), (1,)]

    # Of a primitive of one's own. The last rule is the first that is tried.
    twice = Primitive("twice")
    twice.multiple_results = True
    twice.def_abstract_eval(lambda a: [a, a])
    twice.def_impl(lambda a: [2 * a, 2 * a])
    for number in (1, 2):
        register_rule(twice)(lambda w, n=number: [w, n * jnp.ones(w.shape)])
    first, second = implicit(lambda w: twice.bind(w))(q)
    assert eqq.is_quantized(first)
    assert_close(second, 2 * jnp.ones((64, 48)))
    with pytest.raises(TypeError):
        register_rule(jnp.tanh)  # pyright: ignore


# Tracing what is interpreted costs as much as tracing the function did, not more: there
# are no more equations than that.
def test_number_of_equations():
    mlp = eqx.nn.MLP(64, 64, 64, 6, key=jax.random.key(0))
    quantized = eqq.tree_quantize(mlp, "int8")

    def equations(fn, model):
        arrays, static = eqx.partition(model, eqx.is_array)
        jaxpr = jax.make_jaxpr(lambda a: fn(eqx.combine(a, static), x))(arrays)
        return len(jaxpr.jaxpr.eqns)

    fn = lambda model, x: jax.vmap(model)(x)
    assert equations(implicit(fn), quantized) <= 2 * equations(fn, mlp)


# The program is the one that `@` gives.
@pytest.mark.optimized
def test_run_time_is_unchanged():
    q = matrix()
    text = [
        jax.jit(fn).lower(x, q).compile().as_text().count("fusion(")
        for fn in (lambda x, w: jnp.tanh(x @ w), implicit(lambda x, w: jnp.tanh(x @ w)))
    ]
    assert text[0] == text[1]


def test_cast_for_the_sake_of_rounding():
    q = eqq.quantize(0.3 * normal(16, 16), "int8")
    assert_same(lambda w: w.astype(jnp.float8_e4m3fn).astype(jnp.float32), q)
