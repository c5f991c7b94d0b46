import itertools as it

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant.train import DotGeneral, LowPrecision, tree_compute, tree_preround

from ..helpers import normal
from ..raises import raises


def rounded(a, axes):
    """In float64, to 8-bit integers with scales that extend over some axes."""
    a = np.asarray(a, np.float64)
    unit = np.max(np.abs(a), axis=axes, keepdims=True) / 127
    return np.round(a / unit) * unit


def assert_near(found, wanted):
    scale = np.sqrt(np.mean(np.square(wanted)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * scale)


def low(w, backward=None, axis=-2):
    model = tree_compute({"w": w}, backward=backward, min_size=0, axis=axis)
    return model["w"]


einsums = {  # subscripts, shapes, what each operand contracts, and the axis
    "heads": ("td,dhe->hte", (6, 8), (8, 3, 4), (1,), (0,), -3),
    "several": ("she,hed->sd", (5, 3, 4), (3, 4, 8), (1, 2), (0, 1), (-3, -2)),
    "experts": ("gtd,god->tgo", (2, 6, 8), (2, 4, 8), (2,), (2,), -1),
    "weight first": ("od,td->ot", (4, 8), (6, 8), (1,), (1,), -1),
    "vector": ("d,de->e", (8,), (8, 4), (0,), (0,), -2),
}


# Straight through the rounding, along all that is contracted.
def test_any_dimensions():
    wanted, data = {}, {}
    for name, (subscripts, *shapes, first, second, _) in einsums.items():
        a, b = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
        qa, qb = rounded(a, first), rounded(b, second)
        y = np.einsum(subscripts, qa, qb)
        ct = normal(*y.shape, seed=3)
        inputs, result = subscripts.split("->")
        left, right = inputs.split(",")
        da = np.einsum(f"{result},{right}->{left}", np.float64(ct), qb)
        db = np.einsum(f"{result},{left}->{right}", np.float64(ct), qa)
        wanted[name], data[name] = (y, da, db), (a, b, ct)

    @jax.jit
    def everything(data):
        found, others = {}, {}
        for name, (subscripts, *_, axis) in einsums.items():
            fn = lambda a, b, s=subscripts: jnp.einsum(s, a, b)
            a, b, ct = data[name]
            places = (0,) if name == "weight first" else (1,)

            def of(*operands, fn=fn, places=places, axis=axis):
                new = [
                    low(a, axis=axis) if i in places else a
                    for i, a in enumerate(operands)
                ]
                return eqq.implicit(fn)(*new)

            y, pullback = jax.vjp(of, a, b)
            found[name] = y, *pullback(ct)
            injected = lambda a, b, s=subscripts: jnp.einsum(
                s, a, b, _dot_general=DotGeneral()
            )
            others[name] = injected(a, b), DotGeneral().within(fn)(a, b)
        return found, others

    found, others = everything(data)
    for name in einsums:
        for a, b in zip(found[name], wanted[name], strict=True):
            assert_near(a, b)
        for y in others[name]:
            assert_near(y, wanted[name][0])


# Backward as by `@`, which `test_tree_compute` compares with float64.
def test_rounded_backward_as_of_matrices():
    x, w, ct = normal(6, 8), normal(8, 3, 4, seed=1), normal(6, 3, 4, seed=2)

    @jax.jit
    def both(x, w, ct):
        weight = lambda w, axis: low(w, "int8", axis)
        heads = lambda x, w: jnp.einsum("td,dhe->the", x, w)
        first = lambda x, w: eqq.implicit(heads)(x, weight(w, -3))
        rows = lambda x, w: x @ weight(w.reshape(8, 12), -2)
        _, of = jax.vjp(first, x, w)
        _, wanted = jax.vjp(rows, x, w)
        return of(ct), wanted(ct.reshape(6, 12))

    for a, b in zip(*both(x, w, ct), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def convolution(x, w, ct, strides, padding, dilation, groups):
    """A convolution `NCHW, OIHW`, and its two derivatives for a cotangent."""
    (low_h, high_h), (low_w, high_w) = padding
    padded = np.pad(x, [(0, 0), (0, 0), (low_h, high_h), (low_w, high_w)])
    y, dx, dw = np.zeros(ct.shape), np.zeros(padded.shape), np.zeros(w.shape)
    out, each = ct.shape[2:], w.shape[0] // groups
    for i, j in it.product(*map(range, w.shape[2:])):
        rows = slice(i * dilation[0], None, strides[0])
        columns = slice(j * dilation[1], None, strides[1])
        for g in range(groups):
            ins = slice(g * w.shape[1], (g + 1) * w.shape[1])
            outs = slice(g * each, (g + 1) * each)
            tap = padded[:, ins, rows, columns][:, :, : out[0], : out[1]]
            weight = w[outs, :, i, j]
            y[:, outs] += np.einsum("nihw,oi->nohw", tap, weight)
            back = dx[:, ins, rows, columns][:, :, : out[0], : out[1]]
            back += np.einsum("nohw,oi->nihw", ct[:, outs], weight)
            dw[outs, :, i, j] += np.einsum("nohw,nihw->oi", ct[:, outs], tap)
    inside = (slice(low_h, dx.shape[2] - high_h), slice(low_w, dx.shape[3] - high_w))
    return y, dx[:, :, *inside], dw


def test_convolutions():
    x, w = normal(3, 4, 9, 8), normal(6, 2, 3, 2, seed=1)
    sizes = (2, 1), ((1, 2), (0, 1)), (1, 2), 2
    strides, padding, dilation, groups = sizes

    def conv(x, w):
        return lax.conv_general_dilated(
            *(x, w, strides, padding),
            rhs_dilation=dilation,
            feature_group_count=groups,
        )

    ct = normal(*jax.eval_shape(conv, x, w).shape, seed=2)

    @jax.jit
    def everything(x, w, ct):
        def of(backward, x=x, ct=ct, conv=conv):
            weight = lambda w: low(w, backward, (-3, -2, -1))
            y, of = jax.vjp(lambda x, w: eqq.implicit(conv)(x, weight(w)), x, w)
            return y, *of(ct)

        one = lambda x, w: conv(x[None], w)[0]
        mapped = jax.vmap(lambda x, ct: of(("int8", None), x, ct, one))(x, ct)
        narrow = of(jnp.bfloat16)
        within = lambda x: eqq.implicit(conv)(x, low(w, axis=(-3, -2, -1)))
        forward = jax.jvp(within, (x,), (2 * x,))[1]
        return of(None), of("int8"), mapped, narrow, forward

    plain, both, mapped, narrow, forward = everything(x, w, ct)
    qx, qw = rounded(x, (1, 2, 3)), rounded(w, (1, 2, 3))
    wanted = convolution(qx, qw, np.float64(ct), *sizes)
    rounding = convolution(qx, qw, rounded(ct, (1, 2, 3)), *sizes)
    for found, of in ((plain, wanted), (both, rounding)):
        for a, b in zip(found, of, strict=True):
            assert_near(a, b)
    pairs = wanted[0], rounding[1], wanted[2]
    for a, b in zip((*mapped[:2], np.sum(mapped[2], 0)), pairs, strict=True):
        assert_near(a, b)
    assert_near(forward, convolution(2 * np.float64(x), qw, ct, *sizes)[0])
    for a, b in zip(narrow[1:], wanted[1:], strict=True):
        assert 0 < np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)


class Mixed(eqx.Module):
    """Layers that hand their weights to functions which take arrays only."""

    conv: eqx.nn.Conv1d
    heads: jax.Array  # a stack, of (in, heads, features of each)
    out: eqx.nn.Linear

    def __init__(self, key):
        self.conv = eqx.nn.Conv1d(4, 16, 3, padding=1, key=key)
        self.heads = jr.normal(key, (2, 16, 2, 8)) / 4
        self.out = eqx.nn.Linear(16, 4, key=key)

    def __call__(self, x):
        x = self.conv(x).T

        @jax.checkpoint
        def layer(x, w):
            y = jax.nn.relu(jnp.einsum("td,dhe->the", x, w.astype(x.dtype)))
            return x + y.reshape(x.shape), None

        x, _ = lax.scan(layer, x, self.heads)
        return jax.vmap(self.out)(x)


@pytest.mark.thorough
def test_models_of_other_layers():
    model, x = Mixed(jr.key(0)), jnp.asarray(normal(4, 12))
    made = tree_compute(model, backward="int8", min_size=0, example=x)
    kinds = (made.conv.weight, made.heads, made.out.weight)
    assert all(isinstance(w, LowPrecision) for w in kinds)
    assert isinstance(made, Mixed) and isinstance(made.conv, eqx.nn.Conv1d)
    assert made.heads.axis == -3
    assert tree_compute(made, forward=None) == model

    @eqx.filter_jit
    def everything(made, model):
        loss = lambda m: jnp.sum(jnp.tanh(m(x)) ** 2)
        grad = eqx.filter_value_and_grad(loss)
        again = eqx.filter_grad(lambda m: loss(tree_preround(m)))(made)
        return grad(made), grad(model), again

    (value, found), (exact, wanted), again = everything(made, model)
    assert 0 < abs(value - exact) < 0.05 * exact
    for a, b, c in zip(*map(jtu.tree_leaves, (found, wanted, again)), strict=True):
        assert 0 < np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)
        np.testing.assert_allclose(c, a, rtol=1e-5, atol=1e-6)
    frozen = eqq.train.tree_freeze(made)
    assert eqq.is_quantized(frozen.conv.weight) and eqq.is_quantized(frozen.heads)
    wanted = made.conv.weight.weight
    np.testing.assert_allclose(
        frozen.conv.weight.dequantize(), rounded(wanted, (1, 2)), rtol=1e-5, atol=1e-6
    )
    with pytest.warns(UserWarning, match="Only 8% .* `example=`"):
        assert tree_compute(model, min_size=0).heads is model.heads
    on_call = tree_compute(model.conv, min_size=0, unsupported="on_call")
    np.testing.assert_array_equal(on_call(x), made.conv(x))


# The products of attention, of which no operand is a weight.
def test_attention():
    q, k, v = (jnp.asarray(normal(2, 12, 2, 16, seed=i)) for i in range(3))

    @jax.jit
    def everything(q, k, v):
        def by(dot_general):
            product = lambda s, a, b: jnp.einsum(s, a, b, _dot_general=dot_general)
            scores = product("bqhd,bkhd->bhqk", q, k) / 4
            return product("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

        attention = jax.nn.dot_product_attention
        made = DotGeneral("int8", "int8").within(attention)
        grad = lambda fn: jax.grad(lambda *a: jnp.sum(fn(*a) ** 2), (0, 1, 2))(q, k, v)
        values = made(q, k, v), by(DotGeneral()), by(lax.dot_general)
        return values, grad(made), grad(attention)

    (found, injected, exact), gradients, wanted = everything(q, k, v)
    np.testing.assert_allclose(found, injected, rtol=1e-5, atol=1e-5)
    pairs = [(found, exact), *zip(gradients, wanted, strict=True)]
    for a, b in pairs:
        assert 0 < np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)
    program = jax.jit(lambda q, k: made_scores(q, k)).trace(q, k)
    assert "xi8>" in program.lower(lowering_platforms=("tpu",)).as_text()


def made_scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k, _dot_general=DotGeneral("int8"))


def test_products_that_are_not_rounded_and_bad_input():
    dot_general, numbers = DotGeneral(), (((1,), (0,)), ((), ()))
    integers = jnp.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(
        dot_general(integers, integers.T, numbers), integers @ integers.T
    )
    x = jnp.asarray(normal(3, 4))
    outer = dot_general(x, x, (((), ()), ((), ())))
    np.testing.assert_array_equal(outer, x[:, :, None, None] * x[None, None])
    wide = dot_general(
        *[a.astype(jnp.bfloat16) for a in (x, x.T)],
        numbers,
        preferred_element_type=jnp.float32,
    )
    assert wide.dtype == jnp.float32
    assert DotGeneral() == DotGeneral("int8") and hash(DotGeneral()) is not None
    assert dot_general.within(lambda a: a.T)(x).shape == (4, 3)
    with raises(ValueError, "out_sharding", "P"):
        dot_general(x, x.T, numbers, out_sharding=jax.P())
    with raises(ValueError, "forward", "RSRBinary"):
        DotGeneral("rsrbinary")
    with raises(ValueError, "backward", "3"):
        DotGeneral(backward=("int8",) * 3)
    with pytest.raises(TypeError, match="contracting dimensions"):
        dot_general(x, x, numbers)
    unknown = low(jnp.asarray(normal(3, 4, 4))).mT.mT
    assert unknown.axis == -2
    with raises(ValueError, "axis", "None"):
        LowPrecision(x, None, None, unknown.roundings).freeze()
