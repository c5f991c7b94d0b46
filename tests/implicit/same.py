import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

import eqquant as eqq
from eqquant._implicit import implicit, observing


def assert_close(a, b, tolerance=2e-4):
    """Of trees, within rounding errors relative to the largest number of each array."""
    assert jtu.tree_structure(a) == jtu.tree_structure(b)
    for x, y in zip(jtu.tree_leaves(a), jtu.tree_leaves(b), strict=True):
        x, y = jnp.asarray(x), jnp.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            assert jnp.array_equal(x, y)
            continue
        rounding = tolerance + 8 * float(jnp.finfo(y.dtype).eps)
        wide = np.complex128 if jnp.iscomplexobj(y) else np.float64
        x, y = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
        scale = np.max(np.abs(y), initial=0, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=rounding, atol=rounding * scale)


def assert_same(fn, *args, packed=False, read=None, tolerance=2e-4):
    """`implicit(fn)` is `fn` of the dequantized arguments. It dequantizes nothing on
    the way if `packed`, and returns quantized arrays, or arrays alone, if `packed` is
    `"result"`; `read` is how many products read packed codes.

    **Returns:** what `implicit(fn)` does.
    """
    events = []
    with observing(events.append):
        # (A new function, or what was compiled before would be used again.)
        result = eqx.filter_jit(lambda *args: implicit(fn)(*args))(*args)
    expected = jax.jit(fn)(*eqq.tree_dequantize(args))
    assert_close(eqq.tree_dequantize(result), expected, tolerance)
    dequantized = [event for event in events if event.kind == "dequantize"]
    if packed:
        assert dequantized == []
        leaves = jtu.tree_leaves(result, is_leaf=eqq.is_quantized)
        assert all(map(eqq.is_quantized, leaves)) == (packed == "result")
    if read is not None:
        assert len(events) - len(dequantized) == read
    return result


def assert_same_gradient(fn, x, *args):
    """As `assert_same`, of the derivative with respect to the first argument."""

    def loss(fn):
        return lambda x, *args: sum(
            jnp.sum(jnp.sin(y)) for y in jtu.tree_leaves(fn(x, *args))
        )

    expected = jax.grad(loss(fn))(x, *eqq.tree_dequantize(args))
    assert_close(jax.jit(jax.grad(loss(implicit(fn))))(x, *args), expected)
    # The derivative inside, too.
    assert_close(implicit(jax.grad(loss(fn)))(x, *args), expected)
