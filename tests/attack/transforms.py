from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .oracle import Expected, product


class Transform(NamedTuple):
    """Something that JAX does with `x @ q`.

    - `fn`: of `x`, `v` and `q`, where `v` is of the shape of `x @ q`.
    - `stack`, `most`: how many leading axes `q` should have at least and at most.
    - `expected`: from the same, and `w` in the place of `q`.
    - `rounds`: whether an activation format rounds `x`, as it does no tangents.
    - `flips`: which products there are, by whether they are transposed.
    """

    fn: Callable[..., Any]
    stack: int
    expected: Callable[..., Expected]
    rounds: bool = True
    flips: tuple[bool, ...] = (False,)
    most: int = 9


def _forward(x, v, w):
    return product(x, w)


def _backward(x, v, w):
    return product(v, np.swapaxes(w, -1, -2))


def _matmul(x, q):
    return x @ q


def _nested(x, v, q):
    return jax.vmap(jax.vmap(_matmul, (0, None)))(x, q)


def _second_axis(x, v, q):
    return jax.vmap(_matmul, (1, 1), 1)(x, q)


def _row_of_weights(x, v, q):
    # One matrix of inputs, all weights.
    return jax.vmap(_matmul, (None, 0))(x[0], q)


def _vjp(x, v, q):
    return jax.vjp(lambda x: x @ q, x)[1](v)[0]


def _linear_transpose(x, v, q):
    return jax.linear_transpose(lambda x: x @ q, x)(v)[0]


def _vmapped_vjp(x, v, q):
    return jax.vmap(lambda x, v, q: _vjp(x, v, q))(x, v, q)


def _vjp_of_vmap(x, v, q):
    return jax.vjp(lambda x: jax.vmap(_matmul)(x, q), x)[1](v)[0]


def _rematerialized(x, v, q):
    layer = jax.checkpoint(lambda x: x @ q)
    return jax.vjp(layer, x)[1](v)[0]


def _scan(x, v, q):
    return lax.scan(lambda c, xq: (c, _matmul(*xq)), None, (x, q))[1]


def _vjp_of_scan(x, v, q):
    return jax.vjp(lambda x: _scan(x, v, q), x)[1](v)[0]


def _dynamic(x, v, q):
    def step(i, y):
        return lax.dynamic_update_index_in_dim(y, x[i] @ q[i], i, 0)

    return lax.fori_loop(0, x.shape[0], step, jnp.zeros_like(v))


def _cond(x, v, q):
    return lax.cond(x.shape[0] > 0, _matmul, lambda x, q: jnp.zeros_like(v), x, q)


def _while(x, v, q):
    def step(carry):
        _, i, q = carry
        return x @ q, i + 1, q

    return lax.while_loop(lambda carry: carry[1] < 1, step, (v, 0, q))[0]


def _hvp(x, v, q):
    x = x.astype(jnp.float32)
    loss = lambda x: jnp.sum((x @ q) ** 2) / 2
    return jax.jvp(jax.grad(loss), (x,), (x,))[1]


def _twice(x, v, w):
    # What is wrong with the first product is multiplied by the second.
    first, across = product(x, w), np.swapaxes(w, -1, -2)
    known = np.where(first.wild == 0, first.value, first.wild)
    second = product(known, across)
    weight = np.abs(np.where(np.isfinite(across), across, 0))
    size, slack = first.size @ weight, first.slack @ weight
    slack = slack + second.slack + 1e-7 * size
    unsure = np.any(first.size > 1e37, axis=-1, keepdims=True) | second.unsure
    unsure |= np.any(first.unsure, axis=-1, keepdims=True)
    return Expected(second.value, 2 * size, slack, second.wild, unsure)


transforms = {
    "jit": Transform(lambda x, v, q: x @ q, 0, _forward),
    "left": Transform(lambda x, v, q: (q.mT @ x.mT).mT, 0, _forward),
    "vmap over rows": Transform(
        lambda x, v, q: jax.vmap(lambda r: r @ q, -2, -2)(x), 0, _forward, most=0
    ),
    "vmap over rows, twice": Transform(
        lambda x, v, q: jax.vmap(jax.vmap(lambda r: q.mT @ r))(x[None])[0],
        0,
        _forward,
        most=0,
    ),
    "vmap": Transform(lambda x, v, q: jax.vmap(_matmul)(x, q), 1, _forward),
    "vmap, nested": Transform(_nested, 1, _forward, most=1),
    "vmap over axis 1": Transform(_second_axis, 2, _forward),
    "vmap over q": Transform(_row_of_weights, 1, lambda x, v, w: product(x[0], w)),
    "scan": Transform(_scan, 1, _forward),
    "fori_loop": Transform(_dynamic, 1, _forward),
    "cond": Transform(_cond, 0, _forward),
    "while": Transform(_while, 0, _forward),
    "jvp": Transform(
        lambda x, v, q: jax.jvp(lambda x: x @ q, (x,), (x,))[1], 0, _forward, False
    ),
    "hvp": Transform(_hvp, 0, _twice, False, (False, True)),
    "vjp": Transform(_vjp, 0, _backward, False, (True,)),
    "linear_transpose": Transform(_linear_transpose, 0, _backward, False, (True,)),
    "vmap of vjp": Transform(_vmapped_vjp, 1, _backward, False, (True,)),
    "vjp of vmap": Transform(_vjp_of_vmap, 1, _backward, False, (True,)),
    "vjp of remat": Transform(_rematerialized, 0, _backward, False, (True,)),
    "vjp of scan": Transform(_vjp_of_scan, 1, _backward, False, (True,)),
}


def fits(transform: Transform, stack: tuple[int, ...]) -> bool:
    """Whether it is for weights with these leading axes."""
    return transform.stack <= len(stack) <= transform.most
