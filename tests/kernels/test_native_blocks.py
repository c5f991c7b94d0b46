import itertools as it

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
import eqquant.formats as eqf
import eqquant.kernels.native._library as library

from ..helpers import all_formats, error, normal
from .levels import available


# Kernels of the native library for every format of blocks.
pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason="there is no native library here"
)


# One of each packing, each kind of points, each offset.
formats = (
    *(eqf.Q2_K(), eqf.Q3_K(), eqf.Q4_K(), eqf.Q5_K(), eqf.Q6_K()),
    *(eqf.IQ4_XS(), eqf.Q4_1(), eqf.Q5_0(), eqf.Q5_1(), eqf.Q8_0()),
    eqf.Int(2, 32, "minimum", scale_dtype=jnp.bfloat16),
    *(eqf.Int(3), eqf.Int(4, 48, "minimum"), eqf.Int(4, 64, "zero_point")),
    *(eqf.Int(5, 16), eqf.Int(6, None, "minimum"), eqf.Int(7, 80, "zero_point")),
    *(eqf.Int(8, 32, "minimum"), eqf.Int(8, 32, "zero_point"), eqf.Int(8)),
    *(eqf.FP8(), eqf.FP8("e5m2"), eqf.Dynamic8()),
)


@pytest.mark.examples(2)
@pytest.mark.parametrize("level", available)
@pytest.mark.parametrize("format", formats, ids=str)
def test_products(format, level, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", level)
    sizes = ((17, 3), (640, 530))
    weights = [eqq.quantize(normal(*size), format) for size in sizes]
    pairs = [
        (normal(m, q.shape[0], seed=1), q)
        for m in (1, 2, 3, 4, 7)
        for w in weights
        for q in (w, w.T)
    ]
    pairs.append((normal(34, 640, seed=1), weights[1]))

    # Compiled anew: what is compiled keeps the level that it was for.
    @jax.jit
    def products(pairs):
        return [eqq.qmatmul(x, q, kernel="native_decoded") for x, q in pairs]

    for (x, q), y in zip(pairs, products(pairs), strict=True):
        assert error(y, x, q.dequantize()) < 1e-6
    x, q = pairs[-1]
    chosen = eqq.explain(x, q)
    assert error(jax.jit(lambda x, q: x @ q)(x, q), x, q.dequantize()) < chosen.error


# Some at a time, of which the last are more than the others.
@pytest.mark.examples(1)
@pytest.mark.parametrize("format", (eqf.Int8(), eqf.Ternary(64), eqf.Q4_1()), ids=str)
def test_many_rows(format):
    q = eqq.quantize(normal(70, 96), format)
    for rows in (255, 256, 257, 600):
        x = normal(rows, 70, seed=1)
        y = eqq.qmatmul(x, q, kernel="native_decoded")
        assert error(y, x, q.dequantize()) < 1e-6


@pytest.mark.examples(3)
@pytest.mark.skipif("avx512" not in available, reason="needs AVX512")
@pytest.mark.parametrize(
    "format, exact",
    (
        (eqq.Int4(), True),
        (eqf.MXFP4(), True),
        (eqf.BnbFP4(), True),
        (eqf.Q4_K(), True),
        (eqq.Int8(64), True),
        (eqq.NF4(), False),
    ),
    ids=str,
)
def test_integers_of_16_bits(format, exact, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", "avx512")
    x, q = normal(9, 512, seed=1), eqq.quantize(normal(512, 512), format)
    with pytest.raises(ValueError, match="too large for `precision='highest'`"):
        eqq.qmatmul(x, q, kernel="native_decoded_integers", precision="highest")
    y = eqq.qmatmul(x, q, kernel="native_decoded_integers")
    assert 1e-7 < error(y, x, q.dequantize()) < (2e-5 if exact else 1e-3)
    # Inputs of 8 bits are not rounded again, and sums are exact.
    few = jnp.round(20 * x).at[:, 0].set(127)
    y = eqq.qmatmul(few, q, kernel="native_decoded_integers")
    assert error(y, few, q.dequantize()) < (5e-7 if exact else 1e-3)


# Codes of each width, each offset, and a table; blocks, and rows that end within the
# codes that are unpacked together.
few_formats = (
    *(eqf.Q2_K(), eqf.Q3_K(), eqf.Q4_K(), eqf.Q5_K(), eqf.Q6_K(), eqf.Q4_1()),
    *(eqf.IQ4_XS(), eqf.MXFP4(), eqf.NVFP4(), eqf.IQ4_NL(), eqf.Q8_0()),
    *(eqq.Int4(), eqf.Int(4, 48, "minimum"), eqf.Int(4, 128, "zero_point")),
    *(eqf.Int(2, 64, "minimum"), eqf.Int(3, 32, "zero_point"), eqf.Int(3, None)),
    *(eqf.Int(5, 64, "minimum"), eqf.Int(6, 16), eqf.Int(7, None, "zero_point")),
    *(eqf.Int(8, 32, "minimum"), eqf.Int(8, 48, "zero_point"), eqq.Int8()),
    *(eqq.Binary(64), eqf.Q2_0()),
)


# (Optimized, XLA rounds weights with a minimum once, as the kernel does.)
@pytest.mark.optimized
@pytest.mark.examples(2)
@pytest.mark.skipif("avx512" not in available, reason="needs AVX512")
@pytest.mark.parametrize("format", few_formats, ids=str)
def test_few_rows_of_integers(format, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", "avx512")
    q = eqq.quantize(normal(500, 700), format)
    x = np.array(normal(5, 500, seed=1))
    x[1, ::50] *= 300  # in a unit of their own
    x[2, 7] = 1e6  # too large even for that: in float32
    x[3] = 0
    x[4, 3:] = 0

    @jax.jit
    def product(x, q):
        return eqq.qmatmul(x, q, kernel="native_few_integers")

    w = np.asarray(q.dequantize(), np.float64)
    for rows in ((0,), (1, 0), (3, 4), (0, 1, 3, 4, 0)):
        some = x[list(rows)]
        assert error(product(some, q), some.astype(np.float64), w) < 1e-6
    float32 = eqq.qmatmul(x[2:3], q, kernel="native_decoded")
    np.testing.assert_array_equal(product(x[2:3], q), float32)
    with pytest.raises(ValueError, match="at most 16 rows"):
        eqq.qmatmul(normal(17, 500), q, kernel="native_few_integers")
    with pytest.raises(ValueError, match="not for all"):
        some = x[:1]
        eqq.qmatmul(some, q, kernel="native_few_integers", precision="highest")


# Blocks that begin, and sums that are scaled, within the codes that are read together.
@pytest.mark.parametrize("level", available)
@pytest.mark.parametrize("offset", ("minimum", "zero_point"))
def test_blocks_that_begin_anywhere(level, offset, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", level)
    q = eqq.quantize(normal(604, 148), eqf.Int(8, 176, offset))
    x = normal(2, 604, seed=1)
    y = eqq.qmatmul(x, q, kernel="native_decoded")
    assert error(y, x, q.dequantize()) < 1e-6


# Points that are no multiples of one number, some of them close to zero.
def test_points_that_are_far_from_integers():
    x, q = normal(9, 512), eqq.quantize(normal(512, 512), eqf.Dynamic8())
    explained = eqq.explain(x, q)
    assert explained.kernel != "native_decoded_integers"
    why = dict(explained.refused)["native_decoded_integers"]
    assert "points that are near integers" in why


@pytest.mark.examples(2)
@all_formats
def test_none_is_left_to_the_reference_product(format):
    q = eqq.quantize(jnp.zeros((1024, 512)), format)
    if q.block_size is None or getattr(format, "ordered", False):
        return
    for m in (1, 4, 16, 128):
        for x, w in ((normal(m, 1024), q), (normal(m, 512), q.T)):
            explained = eqq.explain(x, w)
            kernel = explained.kernel
            refused = dict(explained.refused).get("float32_tiles", "")
            if w is not q and "needs JAX 0.11" in refused:
                continue  # Across the blocks, the library has no kernel for many rows.
            assert kernel != "reference"
            # Along the blocks, those that XLA compiles come after the native ones.
            blocks = isinstance(format, eqf.AbstractGGUFBlocks) and w is q
            native = ("native_decoded", "native_few_integers")
            assert not blocks or kernel.startswith(native)


# A minimum that cancels nearly all numbers of a block: no digits are lost in the sums.
@pytest.mark.examples(2)
@pytest.mark.parametrize("bits", (2, 3, 4, 5, 8))
def test_weights_that_are_nearly_zero(bits):
    w = np.full((2048, 128), 1e-3, np.float32)
    w[::32] = 1
    w[1::32] = -(2**bits - 2) / 2 if bits > 2 else -1
    q = eqq.quantize(jnp.asarray(w), eqf.Int(bits, 32, "minimum"))
    x = np.array(normal(3, 2048))
    x[:, ::32] = x[:, 1::32] = 0
    kernels = ["native_decoded"]
    if "avx512" in available:
        kernels.append("native_few_integers")
    for kernel, some in it.product(kernels, (x, x[:2])):
        y = eqq.qmatmul(jnp.asarray(some), q, kernel=kernel)
        assert error(y, some.astype(np.float64), np.asarray(q.dequantize())) < 1e-5
