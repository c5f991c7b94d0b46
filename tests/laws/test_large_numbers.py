"""Numbers of any size come back as accurate as those near one, or not at all: an error
where they are known, NaN where they are traced. Never infinite, and never wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eqquant as eqq

from ..helpers import all_formats, normal
from ..raises import raises


sizes = (1e2, 1e4, 1e5, 1e6, 1e9, 1e20, 1e35, 3e37, 7e37)
w = np.asarray(normal(16, 512))
narrow = (
    *(eqq.NF4(64, jnp.float16), eqq.Int4(64, False, jnp.float16)),
    *(eqq.Int(4, 32, "minimum", scale_dtype=jnp.float16), eqq.Int8(32, jnp.float16)),
    eqq.Nested(eqq.NF4(16, jnp.float16), scale=eqq.Int8(32)),
    eqq.Nested(eqq.NF4(16), scale=eqq.Int8(32, jnp.float16)),
)


def sqnr(w, decoded):
    # Of such numbers, the squares are infinite in float32.
    w, decoded = np.asarray(w, np.float64), np.asarray(decoded, np.float64)
    return 10 * np.log10(np.sum(w**2) / np.sum((decoded - w) ** 2))


def assert_held_or_nan(format):
    decode = jax.jit(lambda w: eqq.quantize(w, format, axis=-1).dequantize())
    expected = sqnr(w, decode(w))
    for size in sizes:
        large = (size * np.asarray(w, np.float64)).astype(np.float32)
        found = np.asarray(decode(large))
        assert not np.any(np.isinf(found))
        nan = np.isnan(found)
        size_of_block = format.block_size or 512
        blocks = np.split(nan, range(0, 512, size_of_block)[1:], axis=-1)
        assert all(np.all(np.all(b, -1) == np.any(b, -1)) for b in blocks)
        if not np.any(nan):
            assert abs(sqnr(large, found) - expected) < 1
        elif size < 1e5:
            raise AssertionError(size)


@pytest.mark.examples(1)
@all_formats
def test_traced(format):
    assert_held_or_nan(format)


@pytest.mark.examples(3)
@pytest.mark.parametrize("format", narrow, ids=str)
def test_traced_narrow(format):
    assert_held_or_nan(format)


@pytest.mark.examples(4)
@pytest.mark.parametrize(
    "format, what",
    [
        *(
            (format, "float16, at most 65504: use `scale_dtype=jnp.f")
            for format in narrow[:4]
        ),
        *((narrow[4], "float16"), (narrow[5], "float16")),
        *(
            (eqq.formats.Q4_0(), r"float16.*`Int8\(32\)`"),
            (eqq.formats.Q4_1(), "float16"),
        ),
        *((eqq.formats.TQ1_0(), "float16"), (eqq.formats.Q6_K(), "float16")),
    ],
    ids=lambda x: None if isinstance(x, str) else str(x),
)
def test_concrete(format, what):
    large = 1e9 * jnp.asarray(w)
    with raises(ValueError, "w", f"up to .*e\\+09, which are too large for.*{what}"):
        eqq.quantize(large, format, axis=-1)
    # Closed over, it is known when the function is traced.
    with pytest.raises(ValueError, match="too large for"):
        jax.jit(lambda x: x @ eqq.quantize(large, format, axis=-1).mT)(jnp.ones(512))


def test_one_number_is_enough():
    large = np.array(w)
    large[3, 100] = 7e4
    format = eqq.NF4(64, jnp.float16)
    with pytest.raises(ValueError, match="up to 7e[+]04.*: 64 of its 8192"):
        eqq.quantize(large, format, axis=-1)
    found = jax.jit(lambda w: eqq.quantize(w, format, axis=-1).dequantize())(large)
    nan = np.argwhere(np.isnan(found))
    assert len(nan) == 64 and np.all(nan[:, 0] == 3) and np.all(nan[:, 1] // 64 == 1)
    # Of a wider dtype it is held.
    q = eqq.quantize(large, eqq.NF4(64, jnp.bfloat16), axis=-1)
    assert np.all(np.isfinite(q.dequantize()))


def test_of_other_dtypes():
    with jax.enable_x64(True):
        for format in (eqq.NF4(), eqq.Int4(64, False), eqq.FP8(), eqq.NVFP4()):
            with pytest.raises(ValueError, match="too large for"):
                eqq.quantize(1e39 * w.astype(np.float64), format, axis=-1)
    # What is rounded up may be beyond float16.
    half = np.full((2, 64), 6e4, np.float16) * np.where(np.arange(64) < 32, 1, -1)
    half = half.astype(np.float16)
    assert np.all(np.isfinite(eqq.quantize(half, "int8", axis=-1).dequantize()))
    with pytest.raises(ValueError, match="too large for"):
        eqq.quantize(half, eqq.Int(2, 64), axis=-1)


def test_converted_files(tmp_path):
    large = {"a.weight": 1e6 * w, "b.weight": w}
    safetensors.numpy.save_file(large, tmp_path / "model.safetensors")
    source = tmp_path / "model.safetensors"
    for i, format in enumerate((eqq.NF4(64, jnp.float16), "q4_0")):
        with pytest.raises(ValueError, match="'a.weight'.*too large for.*float16"):
            eqq.interop.convert(source, tmp_path / str(i), format)
