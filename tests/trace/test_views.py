import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant._report._uses import uses as uses_of_packed
from eqquant._trace import uses


# What the trace takes for a product over a whole axis of a weight, and what `implicit`
# computes from the packed codes of an array that is quantized along this axis, are the
# same.


def scan(w, x):
    return lax.scan(lambda y, w: (y @ w, None), x, w)[0]


def carried(w, x):
    return lax.scan(lambda c, x: (c, x @ c), w[0], x[None])[1]


def loop(w, x):
    return lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ w[i]), x)


def branch(w, x):
    return lax.cond(x[0, 0] > 0, lambda w: x @ w[0], lambda w: x @ w[1], w)


def conv(w, x):
    return lax.conv_general_dilated(x.reshape(1, 16, 5), w, (1,), [(1, 1)])


ids = np.array([2, 0, 1, 2, 3])
sizes = np.array([2, 0, 2, 1], np.int32)
cube, matrix, square = (4, 16, 16), (16, 24), (4, 16)
# By name: a function of a weight and of the inputs, of shape (5, 16), and the shape of
# the weight.
programs = {
    "matmul": (lambda w, x: x @ w, matrix),
    "transpose": (lambda w, x: w.T @ x.T, matrix),
    "first operand": (lambda w, x: jnp.einsum("io,ti->ot", w, x), matrix),
    "permuted": (lambda w, x: jnp.einsum("dgo,td->tgo", w.transpose(1, 0, 2), x), cube),
    "free axes merged": (lambda w, x: x @ w.transpose(1, 0, 2).reshape(16, 64), cube),
    "free axis split": (lambda w, x: x @ w.reshape(16, 2, 12)[:, 1], matrix),
    "axis split": (
        lambda w, x: jnp.einsum("tgd,gdo->to", x.reshape(5, 4, 4), w.reshape(4, 4, 24)),
        matrix,
    ),
    "axes merged": (lambda w, x: x @ w.reshape(16, 6), (4, 4, 6)),
    "axes swapped": (lambda w, x: x @ w.transpose(1, 0, 2).reshape(16, 6), (4, 4, 6)),
    "two axes": (
        lambda w, x: jnp.einsum("tgd,gdo->to", x.reshape(5, 4, 4), w),
        (4, 4, 6),
    ),
    "axes of size one": (lambda w, x: x @ w[:, None, :].squeeze(1), matrix),
    "broadcast": (
        lambda w, x: jnp.einsum(
            "gtd,gdo->gto",
            jnp.broadcast_to(x, (3, 5, 16)),
            jnp.broadcast_to(w, (3, 16, 24)),
        ),
        matrix,
    ),
    "rows sliced": (lambda w, x: x @ w[:, 4:20], matrix),
    "every other row": (lambda w, x: x @ w[:, ::2], matrix),
    "rows split": (lambda w, x: [x @ a for a in jnp.split(w, 3, 1)], matrix),
    "dynamic rows": (
        lambda w, x: x @ lax.dynamic_slice_in_dim(w, jnp.argmax(x[0]), 6, 1),
        matrix,
    ),
    "one of a stack": (lambda w, x: x @ w[2], cube),
    "unstacked": (lambda w, x: [x @ a for a in w], cube),
    "split stack": (lambda w, x: [x @ a[0] for a in jnp.split(w, 4)], cube),
    "inner axis unstacked": (
        lambda w, x: [x @ a for a in jnp.unstack(w, axis=1)],
        (16, 3, 24),
    ),
    "inner axis gathered": (
        lambda w, x: jnp.einsum("td,dto->to", x, w[:, ids]),
        (16, 4, 24),
    ),
    "gathered": (lambda w, x: jnp.einsum("td,tdo->to", x, w[ids]), cube),
    "mapped": (lambda w, x: jax.vmap(lambda w: x @ w)(w), cube),
    "experts": (lambda w, x: lax.ragged_dot(x, w, sizes), cube),
    "scan": (scan, cube),
    "carried unchanged": (carried, cube),
    "loop": (loop, cube),
    "branch": (branch, cube),
    "remat": (lambda w, x: jax.checkpoint(lambda w, x: x @ w)(w, x), matrix),
    "cast": (lambda w, x: x.astype("bfloat16") @ w.astype("bfloat16"), matrix),
    "stop_gradient": (lambda w, x: x @ lax.stop_gradient(w), matrix),
    "barrier": (lambda w, x: x @ lax.optimization_barrier(w), matrix),
    "rows joined": (lambda w, x: x @ jnp.concatenate([w, w], 1), matrix),
    "stacked": (lambda w, x: jnp.einsum("td,gdo->gto", x, jnp.stack([w, w])), matrix),
    "convolution": (conv, (8, 16, 3)),
    "a half": (lambda w, x: x[:, :8] @ w[:8], matrix),
    "groups": (
        lambda w, x: jnp.einsum(
            "tgd,gdo->tgo", x.reshape(5, 4, 4), w.reshape(4, 4, -1)
        ),
        matrix,
    ),
    "axis joined": (
        lambda w, x: jnp.concatenate([x, x], 1) @ jnp.concatenate([w, w]),
        matrix,
    ),
    "sorted": (lambda w, x: x @ jnp.sort(w, 1), matrix),
    "scaled": (lambda w, x: x @ (2 * w), matrix),
    "reversed": (lambda w, x: x @ w[:, ::-1], matrix),
    "rolled": (lambda w, x: x @ jnp.roll(w, 1, 1), matrix),
    # (Empty arrays are made of the input: the edges of an axis that is not padded.)
    "input padded": (
        lambda w, x: jnp.pad(x, ((0, 0), (1, 1)), "edge")[:, 1:-1] @ w,
        matrix,
    ),
    "some gathered": (
        lambda w, x: (x @ w[0], jnp.einsum("td,tdo->to", x[:0], w[ids[:0]])),
        cube,
    ),
}

# What the trace follows, and `implicit` decodes: parts of an axis, and codes that would
# have to be packed again.
followed = {"axes swapped", "a half", "groups", "axis joined"}
# What neither follows.
neither = {"sorted", "reversed"}
# What the trace takes for a function of a weight, and `implicit` for a product of it.
functions = {"scaled"}


def _traced(fn, w, x):
    use, *_ = uses(fn, (w, x))
    changed = [p.contracted for p in use.changed]
    whole = [p.contracted for p in use.products if p.whole]
    parts = [p.contracted for p in use.products if not p.whole]
    return whole, parts, changed


def _packed(fn, w, x, axes):
    axis = tuple(i - w.ndim for i in axes)
    q = eqx.filter_eval_shape(
        lambda w: eqq.quantize(w, "int8", axis=axis if len(axis) > 1 else axis[0]), w
    )
    program = jax.jit(eqq.implicit(fn)).trace(q, x)
    labels = [frozenset({"w"})] * len(jtu.tree_leaves(q)) + [frozenset()]
    return {use.kind for use in uses_of_packed(program.jaxpr, labels)}


@pytest.mark.parametrize("name", programs)
def test_both_agree(name):
    fn, shape = programs[name]
    w = jax.ShapeDtypeStruct(shape, jnp.float32)
    x = jax.ShapeDtypeStruct((5, 16), jnp.float32)
    whole, parts, changed = _traced(fn, w, x)
    found = whole or parts or changed or [(len(shape) - 2,)]
    assert len({*map(frozenset, found)}) == 1
    packed = _packed(fn, w, x, sorted(found[0]))
    assert packed == ({"dequantize"} if name in followed | neither else {"product"})
    assert bool(whole) == (name not in neither | functions | {"a half", "groups"})
    assert bool(parts) == (name in {"a half", "groups"})
    assert bool(changed) == (name in functions)
