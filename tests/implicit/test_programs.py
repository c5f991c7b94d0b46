import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import eqquant as eqq
from eqquant import implicit

from ..helpers import formats, normal
from .same import assert_close


n = 16
ids = jnp.asarray([3, 1, 15, 2, 2, 0, 7, 7, 9, 4, 5, 6, 1, 2, 3, 14])


@jax.custom_vjp
def doubled(a, b):
    return a @ b


doubled.defvjp(lambda a, b: (a @ b, (a, b)), lambda r, g: (2 * g @ r[1].T, r[0].T @ g))


def bounded(a):
    return a / (1 + jnp.max(jnp.abs(a)))


# Functions of two square matrices to one, so that they can follow one another in any
# order. Some are of several primitives.
steps = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (jnp.abs(b) + 2.0),
    "scaled": lambda a, b: 0.5 * a,
    "divided": lambda a, b: b / 3.0,
    "neg": lambda a, b: -a,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "exp": lambda a, b: jnp.exp(-jnp.abs(a)),
    "log": lambda a, b: jnp.log(1.5 + jnp.abs(b)),
    "tanh": lambda a, b: jnp.tanh(a),
    "sqrt": lambda a, b: jnp.sqrt(1.0 + a * a),
    "rsqrt": lambda a, b: lax.rsqrt(1.0 + jnp.abs(b)),
    "integer_pow": lambda a, b: a**3,
    "logistic": lambda a, b: jax.nn.sigmoid(a),
    "erf": lambda a, b: lax.erf(b),
    "relu": lambda a, b: jax.nn.relu(a + 0.1),
    "softmax": lambda a, b: jax.nn.softmax(a, axis=-1),
    "select_n": lambda a, b: jnp.where(a > 0.3, a, b),
    "clamp": lambda a, b: jnp.clip(a, -0.3, 0.4),
    "matmul": lambda a, b: a @ b,
    "transposed": lambda a, b: a @ b.T,
    "einsum": lambda a, b: jnp.einsum("ij,kj->ki", a, b),
    "heads": lambda a, b: jnp.einsum(
        "ahe,heo->ao", a.reshape(n, 4, 4), b.reshape(4, 4, n)
    ),
    "batched": lambda a, b: jnp.einsum("ij,ij->i", a, b)[:, None] * a,
    "transpose": lambda a, b: a.T,
    "reshape": lambda a, b: a.reshape(4, 4, n).reshape(n, n),
    "rows": lambda a, b: a[ids],
    "take": lambda a, b: jnp.take(b, ids, axis=1),
    "slice": lambda a, b: jnp.concatenate([a[8:], b[:8]]),
    "columns": lambda a, b: jnp.concatenate([a[:, 8:], b[:, :8]], axis=1),
    "split": lambda a, b: jnp.concatenate(jnp.split(a, 4)[::-1]),
    "dynamic_slice": lambda a, b: lax.dynamic_slice(
        jnp.tile(a, (2, 1)), (ids[0], 0), (n, n)
    ),
    "broadcast": lambda a, b: jnp.broadcast_to(a[0], (n, n)) + b,
    "stack": lambda a, b: jnp.stack([a, b])[1],
    "outer": lambda a, b: jnp.outer(a[:, 0], b[0]),
    "reduce_sum": lambda a, b: jnp.sum(a, axis=1, keepdims=True) * b / n,
    "reduce_max": lambda a, b: a - jnp.max(b, axis=0, keepdims=True),
    "cumsum": lambda a, b: jnp.cumsum(a, axis=0) / n,
    "sort": lambda a, b: jnp.sort(b, axis=1),
    "rev": lambda a, b: a[::-1],
    "pad": lambda a, b: jnp.pad(a, ((0, 1), (1, 0)))[1:, :-1],
    "scatter": lambda a, b: a.at[ids[:3]].set(b[:3]),
    "complex": lambda a, b: jnp.real(lax.complex(a, b) * 1j),
    "stop_gradient": lambda a, b: lax.stop_gradient(a) * b,
    "barrier": lambda a, b: lax.optimization_barrier((a, b))[1],
    "jit": lambda a, b: jax.jit(lambda a, b: a @ b - b)(a, b),
    "checkpoint": lambda a, b: jax.checkpoint(lambda a, b: jnp.tanh(a @ b))(a, b),
    "custom_vjp": doubled,
    "cond": lambda a, b: lax.cond(a[0, 0] > 0, lambda: a, lambda: b),
    "scan": lambda a, b: lax.scan(lambda c, _: (0.3 * (c @ b), None), a, None, 2)[0],
    "while": lambda a, b: lax.fori_loop(
        0, 2, lambda i, c: (0.5 * c[0] @ c[1], c[1]), (a, b)
    )[0],
    "vmap": lambda a, b: jax.vmap(lambda r: b @ r)(a),
    "convolution": lambda a, b: lax.conv_general_dilated(
        a[None], b[:, :15].reshape(n, 5, 3)[:, :4], (1,), "SAME", feature_group_count=4
    )[0],
}


@pytest.mark.thorough
@settings(max_examples=14)
@given(
    program=st.lists(
        st.tuples(st.sampled_from(sorted(steps)), st.integers(0, 9), st.integers(0, 9)),
        min_size=4,
        max_size=7,
    ),
    names=st.tuples(*[st.sampled_from(sorted(formats))] * 2),
    axes=st.tuples(*[st.sampled_from([-1, -2])] * 2),
)
def test_programs(program, names, axes):
    first, second = (
        eqq.quantize(0.5 * normal(n, n, seed=i), formats[name], axis=axis)
        for i, (name, axis) in enumerate(zip(names, axes))
    )
    x = 0.5 * normal(n, n, seed=2)

    def run(x, first, second):
        # The operands of a step are the results of steps before, the quantized arrays
        # more often than not.
        values = [first, second, x]
        for name, i, j in program:
            a, b = values[-1 - i % len(values)], values[j % len(values)]
            y = steps[name](a, b)
            values.append(y if y.dtype == jnp.float32 else bounded(y))
        total = sum(jnp.sum(jnp.sin(v)) for v in values[3:])
        return total, [v * 1.0 for v in values[-3:]]

    expected = jax.jit(jax.value_and_grad(run, has_aux=True))(
        x, first.dequantize(), second.dequantize()
    )
    result = jax.jit(jax.value_and_grad(implicit(run), has_aux=True))(x, first, second)
    assert_close(eqq.tree_dequantize(result), expected, 2e-3)
