"""Formats of zeros and ones, and of signs, and numbers that they have."""

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq


kinds = {"rsrbinary": eqq.RSRBinary, "rsrternary": eqq.RSRTernary}
every_kind = pytest.mark.parametrize("kind", kinds.values(), ids=kinds)
every_format = pytest.mark.parametrize(
    "format", [kind(k) for kind in kinds.values() for k in range(1, 13)], ids=str
)
some_formats = pytest.mark.parametrize(
    "format", [eqq.RSRBinary(), eqq.RSRTernary(), eqq.RSRTernary(9)], ids=str
)


def draw(format, *shape, seed=0, dtype=np.float32):
    """Numbers of the domain of a format. Some rows and columns are the same all over,
    so that codes repeat, and others never occur."""
    rng = np.random.default_rng(seed)
    w = rng.choice(np.asarray(format.domain), shape)
    if w.ndim > 1:
        w[..., :: w.shape[-1] // 2 + 1] = 0
        w[..., -1:, :] = 0
        w[..., : w.shape[-2] // 3, :] = 1
    return jnp.asarray(w, dtype)


def integers(*shape, seed=1, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).integers(-99, 100, shape), dtype)


def exact(x, w):
    """`x @ w`, of integers."""
    return np.matmul(np.asarray(x, np.float64), np.asarray(w, np.float64))
