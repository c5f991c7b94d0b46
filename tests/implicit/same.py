import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant import implicit
from eqquant._report._uses import Use, uses


def assert_close(a, b, tolerance=2e-4):
    """Of trees, within rounding errors relative to the largest number of each array."""
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    for x, y in zip(jtu.tree_leaves(a), jtu.tree_leaves(b), strict=True):
        x, y = jnp.asarray(x), jnp.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            assert np.array_equal(x, y)
            continue
        rounding = tolerance + 8 * float(jnp.finfo(y.dtype).eps)
        wide = np.complex128 if jnp.iscomplexobj(y) else np.float64
        x, y = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
        scale = np.max(np.abs(y), initial=0, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=rounding, atol=rounding * scale)


def traced_implicit(fn, *args) -> jax.stages.Traced:
    """`implicit(fn)` as JAX traces it."""
    arrays, static = eqx.partition(args, eqx.is_array)
    call = lambda arrays: implicit(fn)(*eqx.combine(arrays, static))
    return jax.jit(call).trace(arrays)


def uses_in(traced: jax.stages.Traced) -> list[Use]:
    """What it does with quantized arrays."""
    number = len(traced.jaxpr.in_avals)
    return uses(traced.jaxpr, [frozenset()] * number)


def assert_same(fn, *args, packed=False, read=None, tolerance=2e-4):
    """`implicit(fn)` is `fn` of the dequantized arguments. It dequantizes nothing on
    the way if `packed`, and returns quantized arrays, or arrays alone, if `packed` is
    `"result"`; `read` is how many products read packed codes.

    **Returns:** what `implicit(fn)` does.
    """
    with pytest.MonkeyPatch.context() as patch:
        if packed:
            patch.setenv("EQQUANT_ON_DEQUANTIZE", "raise")
        traced = traced_implicit(fn, *args)
    result = traced.lower().compile()(eqx.filter(args, eqx.is_array))
    found = uses_in(traced)
    of_dense = eqx.filter_jit(lambda args: fn(*eqq.tree_dequantize(args)))
    expected = of_dense(args)
    assert_close(eqq.tree_dequantize(result), expected, tolerance)
    if packed:
        leaves = jtu.tree_leaves(result, is_leaf=eqq.is_quantized)
        assert all(map(eqq.is_quantized, leaves)) == (packed == "result")
    if read is not None:
        products = [use for use in found if use.kind == "product"]
        assert len(products) == read, found
    return result


def assert_same_gradient(fn, x, *args):
    """As `assert_same`, of the derivative with respect to the first argument."""

    def loss(fn):
        return lambda x, *args: sum(
            jnp.sum(jnp.sin(y)) for y in jtu.tree_leaves(fn(x, *args))
        )

    # Outside of it, and inside.
    @jax.jit
    def gradients(x, *args):
        return jax.grad(loss(implicit(fn)))(x, *args), implicit(inside)(x, *args)

    inside = jax.grad(loss(fn))
    of_dense = eqx.filter_jit(lambda x, args: inside(x, *eqq.tree_dequantize(args)))
    expected = of_dense(x, args)
    for gradient in gradients(x, *args):
        assert_close(gradient, expected)
