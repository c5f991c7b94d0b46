import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import AbstractGrid


# The one table of formats: every law is run over it. First those that weights are
# quantized in here.
_native = {
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
    "square4": eqq.Square4(32),
    "binary": eqq.Binary(),
    "binary-128": eqq.Binary(128),
    "nested": eqq.Nested(eqq.NF4(16), scale=eqq.Int8(32)),
    "rotated": eqq.Rotated(eqq.Int4(64), block=64),
}

# And those that others have stored weights in.
_foreign = {
    "int-2": eqq.Int(2, 32),
    "int-3-minimum": eqq.Int(3, 64, "minimum", scale_dtype=jnp.bfloat16),
    "int-4-ordered": eqq.Int(4, 32, "zero_point", ordered=True),
    "int-6-channel": eqq.Int(6, None),
    "int-7-zero-point": eqq.Int(7, 128, "zero_point"),
    "fp8": eqq.FP8(),
    "fp8-e5m2-tensor": eqq.FP8("e5m2", scale="tensor"),
    "fp4": eqq.FP4(),
    "bnb-fp4": eqq.formats.BnbFP4(),
    "bnb-double": eqq.Nested(eqq.NF4(32), scale=eqq.formats.BnbScale(32)),
    "mxfp4": eqq.MXFP4(),
    "mxfp8": eqq.MXFP8(),
    "nvfp4": eqq.NVFP4(),
    "iq4_nl": eqq.formats.IQ4_NL(),
    "iq4_xs": eqq.formats.IQ4_XS(),
    "q1_0": eqq.formats.Q1_0(),
    "q2_0": eqq.formats.Q2_0(),
    "q2_k": eqq.formats.Q2_K(),
    "q3_k": eqq.formats.Q3_K(),
    "q4_0": eqq.formats.Q4_0(),
    "q4_1": eqq.formats.Q4_1(),
    "q4_k": eqq.formats.Q4_K(),
    "q5_0": eqq.formats.Q5_0(),
    "q5_1": eqq.formats.Q5_1(),
    "q5_k": eqq.formats.Q5_K(),
    "q6_k": eqq.formats.Q6_K(),
    "q8_0": eqq.formats.Q8_0(),
    "tq1_0": eqq.formats.TQ1_0(),
    "tq2_0": eqq.formats.TQ2_0(),
    "rotated-q4_k": eqq.Rotated(eqq.formats.Q4_K(), seed=1),
}

# And those whose numbers are chosen together. (With few states, to take little time.)
_trellises = {
    "trellis": eqq.Trellis(2, states=8),
    "trellis-3": eqq.Trellis(3, states=8, scale_dtype=jnp.float32),
}
formats = _native | _foreign | _trellises

# One of each kind of stored arrays, and of kernels. Tests of the others are `thorough`.
kinds_of_formats = (
    *("nf4", "int8", "int4-affine", "ternary", "binary", "nested", "rotated"),
    *("int-3-minimum", "fp8-e5m2-tensor", "mxfp4", "q4_0", "q4_k", "trellis"),
)


def each(names):
    """Names of formats, as parameters of a test."""

    def parameter(name):
        marks = () if name in kinds_of_formats else pytest.mark.thorough
        return pytest.param(name, id=name, marks=marks)

    return list(map(parameter, names))


def over(names):
    """Runs a test over formats, which it calls `format`."""
    return pytest.mark.parametrize(
        "format",
        [p._replace(values=(formats[p.id],)) for p in each(names)],
    )


all_formats = over(formats)
native_formats = over(_native)
grids = over([n for n, f in formats.items() if isinstance(f, AbstractGrid)])

# For tests that put many formats into one program, or one file.
many_at_once = pytest.mark.parametrize(
    "names",
    [kinds_of_formats, pytest.param(tuple(formats), marks=pytest.mark.thorough)],
    ids=("kinds", "all"),
)

# For what takes long to compile and does not depend on the details.
main_formats = over(
    ("nf4", "int8", "int8-32", "int4", "int4-affine", "ternary", "binary", "nested")
)


def check_warned_here(warning, file):
    """That a warning is about a line of this file."""
    # (Where types are checked, functions that check them stand in between.)
    if not hasattr(eqq.tree_quantize, "__wrapped__"):
        assert warning.filename == file


def normal(*shape, seed=0, dtype=np.float32):
    """Numbers of a normal distribution, made by numpy: the same on every version, and
    nothing is compiled for them."""
    w = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(w.astype(dtype))  # (`jnp.asarray` compiles a copy)


@eqx.filter_jit
def encode(format, w):
    """`format.encode(w)`, as one program. The format is static."""
    return format.encode(w)


@eqx.filter_jit
def decode(layout, stored):
    """`layout.decode(stored)`, as one program. The layout is static."""
    return layout.decode(stored)


@eqx.filter_jit
def each_row(model, x):
    """The model's results for the rows of `x`, as one program."""
    return jax.vmap(model)(x)


def trees_equal(*trees):
    """`equinox.tree_equal` by numpy: for which nothing is compiled."""

    def by_numpy(leaf):
        return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf

    return eqx.tree_equal(*(jtu.tree_map(by_numpy, tree) for tree in trees))


def error(y, x, w):
    """The largest error of `y = x @ w`, relative to `|x| @ |w|`, in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    difference = np.abs(np.asarray(y, np.float64) - x @ w)
    bound = np.abs(x) @ np.abs(w)
    assert difference.shape == bound.shape
    ratio = difference / np.where(bound == 0, 1, bound)
    return np.max(ratio, initial=0)
