import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import formats, normal


some_formats = pytest.mark.parametrize(
    "name", ("nf4", "int8", "int8-32", "ternary-48", "nested")
)
n = 48
x = normal(n)
einsum = lambda w: jnp.einsum("k,...kn->...n", x, w)

# What is done to a quantized array, and to an ordinary one.
uses = {
    "right": (lambda q: x @ q, lambda w: x @ w),
    "left": (lambda q: q @ x, lambda w: w @ x),
    "compiled": (jax.jit(lambda q: x @ q), lambda w: x @ w),
    "dequantize": (lambda q: q.dequantize(), lambda w: w),
    "index": (lambda q: eqq.dequantize(q[1]) if q.ndim > 2 else q[1], lambda w: w[1]),
    "arithmetic": (jax.jit(lambda q: q + 1.0), lambda w: w + 1),
    "implicit": (eqq.implicit(einsum), einsum),
    "qdot": (lambda q: eqq.qeinsum("k,...kn->...n", x, q), einsum),
}


# All axes are of one size, or else errors of shapes would hide what is mapped. It is
# what it is of the array, or an error at the `vmap`.
@pytest.mark.examples(1)
@some_formats
@pytest.mark.parametrize("axis", (-1, -2))
@pytest.mark.parametrize("ndim", (2, 3))
def test_vmap_over_any_axis(name, axis, ndim):
    scale = jnp.arange(1, n + 1, dtype=jnp.float32)
    w = normal(*[n] * ndim) * scale.reshape([-1] + [1] * (ndim - 1))
    q = eqq.quantize(w, formats[name], axis=axis)
    dense = q.dequantize()
    for in_axes in range(-ndim, ndim):
        leading = in_axes in ((0, -3) if ndim > 2 else ())
        for use, (fn, of_dense) in uses.items():
            if ndim == 2 and use in ("index", "implicit", "qdot"):
                continue
            try:
                found = jax.vmap(fn, in_axes)(q)
            except ValueError as error:
                # (What is compiled by itself knows of shapes only.)
                said = ("in_axes", "inconsistent sizes")
                assert use in ("compiled", "qdot") or any(
                    text in str(error) for text in said
                )
                assert not leading, use
                continue
            expected = jax.vmap(of_dense, in_axes)(dense)
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=0.1)


# What is computed from what is mapped, along whichever axis, is an array as any other.
@pytest.mark.parametrize("in_axes", (0, 1, 2))
def test_quantized_where_it_is_mapped(in_axes):
    w = normal(n, n, n)

    def fn(w):
        q = eqq.quantize(w, "int8")
        return x @ q, q @ x, q.dequantize(), q[3], eqq.implicit(einsum)(q)

    stacked = jnp.moveaxis(w, in_axes, 0)
    found = jax.vmap(fn, in_axes)(w)
    one = fn(stacked[5])
    for y, expected in zip(found, one, strict=True):
        np.testing.assert_allclose(y[5], expected, rtol=1e-4, atol=1e-4)


def test_the_error_is_a_sentence():
    # Both stored arrays have an axis of the rows, the last one.
    q = eqq.quantize(normal(3, n, n), eqq.Int8(16))
    for wrap in (lambda fn: fn, jax.jit, jax.checkpoint):
        for fn in (lambda q: q.dequantize(), lambda q: x @ q, lambda q: q[0]):
            with pytest.raises(ValueError, match="along leading axes.*`in_axes`"):
                jax.vmap(wrap(fn), 2)(q)


def test_scales_are_refused_too():
    q = eqq.quantize(normal(64, 48), "int8")
    with pytest.raises(ValueError, match="along leading axes"):
        jax.vmap(lambda q: q.scale, 1)(q)


# What comes out of such a map has scales along its rows.
@pytest.mark.parametrize("name", ["int8", "nf4", "int4"])
def test_what_was_mapped_is_refused(name):
    q = eqq.quantize(normal(64, 64), name)
    with pytest.raises(ValueError, match="leading axes only"):
        jax.vmap(lambda q: q, 1)(q).dequantize()
