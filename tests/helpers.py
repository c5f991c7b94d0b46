import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq


# The one table of formats: every law is run over it.
formats = {
    "nf4": eqq.NF4(64),
    "nf4-bfloat16-scales": eqq.NF4(32, scale_dtype=jnp.bfloat16),
    "nf4-channel": eqq.NF4(None),
    "int8": eqq.Int8(),
    "int8-32": eqq.Int8(32),
    "int4": eqq.Int4(64),
    "int4-affine": eqq.Int4(64, symmetric=False),
    "ternary": eqq.Ternary(),
    "ternary-48": eqq.Ternary(48),
    "ternary-2-bits": eqq.Ternary(64, radix=4),
    "ternary-tensor": eqq.Ternary(scale="tensor"),
    "ternary-threshold": eqq.Ternary(128, rule="threshold"),
    "dynamic8": eqq.Dynamic8(32),
    "binary": eqq.Binary(),
    "binary-128": eqq.Binary(128),
    "nested": eqq.Nested(eqq.NF4(16), scale=eqq.Int8(32)),
}


def _over(names):
    each = [pytest.param(formats[name], id=name) for name in names]
    return pytest.mark.parametrize("format", each)


all_formats = _over(formats)

# One of each kind, for what takes long to compile and does not depend on the details.
main_formats = _over(
    ("nf4", "int8", "int8-32", "int4", "int4-affine", "ternary", "binary", "nested")
)


def normal(*shape, seed=0, dtype=np.float32):
    """Numbers of a normal distribution, made by numpy: the same on every version."""
    w = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(w, dtype)


def error(y, x, w):
    """The largest error of `y = x @ w`, relative to `|x| @ |w|`, in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    difference = np.abs(np.asarray(y, np.float64) - x @ w)
    bound = np.abs(x) @ np.abs(w)
    assert difference.shape == bound.shape
    ratio = difference / np.where(bound == 0, 1, bound)
    return np.max(ratio, initial=0)
