import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._solvers import solved
from eqquant.formats import Layout

from ..helpers import decode, encode, formats, normal
from ..raises import raises
from . import oracle


def numbers(stored, format, k):
    return np.asarray(decode(Layout(format).trimmed(stored, k), stored), np.float64)


def error(w, stored, format):
    return np.abs(np.asarray(w, np.float64) - numbers(stored, format, w.shape[-1]))


def with_outliers(n, k):
    w = np.array(normal(n, k, seed=5))
    w[:, 7::64] *= 8
    return jnp.asarray(w)


of_paper = (
    eqq.Int(3, 32, "minimum"),
    eqq.Int(2, 16, "minimum"),
    eqq.NF4(32),
    eqq.Int4(16, symmetric=True),
)


@pytest.mark.examples(1)
@pytest.mark.parametrize("format", of_paper, ids=str)
@pytest.mark.parametrize("p", (0.5, 0.7, 1.0))
def test_the_losses_are_those_of_the_paper(format, p):
    k = format.block_size
    w = with_outliers(40, 64)[:, :k]
    method = eqq.HQQ(p, beta=2.0, kappa=1.1)
    found = np.sum(error(w, method.solve(w, format), format) ** p, -1)
    stored = encode(format, w)
    points = format.to_points(jnp.arange(format.levels, dtype=jnp.uint8))
    points = np.asarray(points, np.float64)
    if isinstance(format, eqq.Int4):
        points = points[1:]  # The code of -8 is not used.
    scale = np.asarray(format.scales(stored, 0), np.float64)[:, 0]
    low = format.offsets(stored)
    low = None if low is None else np.asarray(low, np.float64)[:, 0]
    wanted = oracle.hqq(w, points, scale, low, p, 2.0, 1.1, method.steps)
    # (In float32, a number halfway between two may be rounded otherwise.)
    assert np.median(np.abs(found / wanted - 1)) < 1e-3
    np.testing.assert_allclose(np.sum(found), np.sum(wanted), rtol=0.02)
    plain = np.sum(error(w, stored, format) ** p)
    assert np.sum(found) < 0.999 * plain


of_all_kinds = ("nf4-bfloat16-scales", "int4-affine", "int-3-minimum", "q4_k", "q6_k")
composites = ("mxfp4", "mxfp8", "nvfp4", "nested", "bnb-double", "ternary-tensor")


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", (*of_all_kinds, *composites))
def test_no_row_is_worse_than_rounded_to_nearest(name):
    format, w, method = formats[name], with_outliers(5, 200), eqq.HQQ()
    found, plain = method.solve(w, format), encode(format, w)
    like = lambda stored: jax.tree.map(lambda a: (a.shape, a.dtype), stored)
    assert like(found) == like(plain)
    new, old = (np.sum(error(w, s, format) ** 0.7, -1) for s in (found, plain))
    if name in ("bnb-double", "ternary-tensor"):
        new, old = np.sum(new), np.sum(old)
    assert np.all(new <= old * (1 + 1e-4))
    # (Where scales have few bits, the next one is too far.)
    if name not in ("mxfp4", "mxfp8", "nvfp4"):
        assert np.sum(new) < 0.9999 * np.sum(old)


# What is not outlying suffers less from what is.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "format", (eqq.NF4(64), eqq.Int4(64, symmetric=False), eqq.Int(3, 64, "minimum"))
)
def test_outliers(format):
    w = with_outliers(32, 256)
    plain, searched = encode(format, w), eqq.ScaleSearch().solve(w, format)
    found = eqq.HQQ().solve(w, format)
    most = eqq.HQQ(search=True).solve(w, format)
    middle = [np.median(error(w, s, format)) for s in (plain, searched, found, most)]
    assert middle[2] < 0.97 * middle[0]
    assert middle[3] < 0.9 * min(middle[:3])
    # Without a search for scales, outliers are nearer to what they were.
    outlying = np.abs(np.asarray(w)) > 8
    far = [np.max(error(w, s, format)[outlying]) for s in (found, most)]
    assert far[0] < 0.8 * far[1]


def test_a_gram_is_ignored():
    w, h = normal(4, 64), oracle.gram(oracle.inputs("outliers", 64))
    one = eqq.HQQ().solve(w, eqq.NF4(32), jnp.asarray(h))
    other = eqq.HQQ().solve(w, eqq.NF4(32))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_a_model():
    mlp = eqx.nn.MLP(32, 16, 48, depth=1, key=jax.random.key(0))
    format = eqq.Int(3, 16, "minimum")
    q = eqq.tree_quantize(mlp, format, min_size=0, method=eqq.HQQ())
    w = mlp.layers[0].weight
    one = solved(w, format, eqq.HQQ(), axis=-1)
    found = q.layers[0].weight.dequantize()
    np.testing.assert_allclose(found, one.dequantize(), atol=1e-6)
    assert not np.allclose(
        found, eqq.quantize(w, format, axis=-1).dequantize(), atol=1e-3
    )


def test_numbers_that_are_not_finite():
    w = normal(4, 64).at[1, 40].set(jnp.nan)
    format = eqq.Int(3, 32, "minimum")
    found = jax.jit(lambda w: solved(w, format, eqq.HQQ(), axis=-1).dequantize())(w)
    found = np.asarray(found)
    assert np.all(np.isnan(found[1, 32:])) and np.all(np.isfinite(found[[0, 2, 3]]))


def test_zeros():
    w, format = jnp.zeros((2, 64)), eqq.Int(3, 32, "minimum")
    for method in (eqq.HQQ(), eqq.HQQ(search=True)):
        assert np.all(error(w, method.solve(w, format), format) == 0)


def test_errors():
    with raises(ValueError, "p", "1.5"):
        eqq.HQQ(1.5)
    with raises(ValueError, "p", "0"):
        eqq.HQQ(0.0)
    with raises(ValueError, "steps", "-1"):
        eqq.HQQ(steps=-1)
    with raises(ValueError, "beta", "0"):
        eqq.HQQ(beta=0.0)
    with raises(ValueError, "kappa", "0.9"):
        eqq.HQQ(kappa=0.9)
