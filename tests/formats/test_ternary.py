import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqquant as eqq

from ..helpers import normal
from ..raises import raises


# In all rules and packings, with blocks that are short and rows of all scales.
ternary = [
    *(eqq.Ternary(), eqq.Ternary(32), eqq.Ternary(48, rule="threshold")),
    *(eqq.Ternary(radix=4), eqq.Ternary(rule="threshold", radix=4)),
    *(eqq.Ternary(scale="tensor"), eqq.Ternary(scale="tensor", rule="threshold")),
]
binary = [eqq.Binary(), eqq.Binary(32)]


def drawn(format, dtype=np.float32, zeros=0.7):
    """Numbers that are -s, 0 and s in each block, which are what they are."""
    rng = np.random.default_rng(0)
    scale = 10 ** rng.uniform(-6, 6, (7, 1))
    scale = np.broadcast_to(scale, (7, 100)).astype(dtype).astype(np.float32)
    scale = scale[:1] if getattr(format, "scale", "") == "tensor" else scale
    signs = rng.choice([-1, 1], (7, 100))
    if isinstance(format, eqq.Ternary):
        signs = signs * (rng.uniform(0, 1, (7, 100)) > zeros)
        signs[3, :40], signs[4] = 0, 0
    return (signs * scale).astype(np.float32)


@pytest.mark.examples(3)
@pytest.mark.parametrize("zeros", (0.03, 0.4, 0.97))
@pytest.mark.parametrize("format", ternary, ids=str)
def test_ternary_numbers_are_exact(format, zeros):
    w = drawn(format, zeros=zeros)
    q = eqq.quantize(w, format, axis=-1)
    np.testing.assert_array_equal(q.dequantize(), w)
    mapped = jax.jit(jax.vmap(lambda w: eqq.quantize(w, format, axis=-1)))(w[None])
    np.testing.assert_array_equal(mapped.dequantize()[0], w)


@pytest.mark.parametrize("format", binary, ids=str)
def test_binary_numbers_are_exact(format):
    w = drawn(format)
    found = eqq.quantize(w, format, axis=-1).dequantize()
    np.testing.assert_array_equal(found, w)


# Law 2: what was decoded has the same codes and scales.
@pytest.mark.examples(4)
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
@pytest.mark.parametrize("format", (*ternary, *binary), ids=str)
def test_requantized(format, dtype):
    format = dataclasses.replace(format, scale_dtype=dtype)
    q = eqq.quantize(normal(7, 100), format, axis=-1)
    again = eqq.quantize(q.dequantize(), format, axis=-1)
    for name, stored in q.stored.items():
        np.testing.assert_array_equal(again.stored[name], stored)


# A number that the scales cannot hold is rounded to one that they hold.
@pytest.mark.parametrize("format", ("float16", "bfloat16"))
def test_scales_that_are_not_held(format):
    dtype = np.dtype(format if format == "float16" else ml_dtypes.bfloat16)
    signs = np.sign(drawn(eqq.Ternary(), zeros=0.5)[:1])
    for s in (1.001, 0.5):
        q = eqq.quantize(
            signs * np.float32(s), eqq.Ternary(None, scale_dtype=dtype), axis=-1
        )
        expected = np.float32(dtype.type(s))
        np.testing.assert_array_equal(q.dequantize(), signs * expected)


# One other number, and the scale is the mean.
def test_almost_ternary():
    w = np.where(np.arange(100) % 2, 1.0, 0.0).astype(np.float32)[None]
    w[0, 1] = 0.99
    found = np.asarray(eqq.quantize(w, eqq.Ternary(), axis=-1).scale)
    np.testing.assert_allclose(found, np.mean(w), rtol=1e-6)
    w = np.ones((1, 40), np.float32)
    w[0, 7] = 0
    found = eqq.quantize(w, eqq.Binary(32), axis=-1).scale
    np.testing.assert_allclose(found[..., 0].ravel()[0], 31 / 32, rtol=1e-6)


@pytest.mark.examples(1)
@pytest.mark.parametrize("spec", (P("a", "b"), P("a"), P(None, "a")))
def test_sharded(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    for format in (eqq.Ternary(32, radix=4), eqq.Ternary(scale="tensor", radix=4)):
        rng = np.random.default_rng(0)
        w = rng.choice([-0.3, 0, 0.3], (64, 256)).astype(np.float32)
        placed = jax.device_put(w, NamedSharding(mesh, spec))
        q = eqq.quantize(placed, format, axis=-1)
        np.testing.assert_array_equal(q.dequantize(), w)


@pytest.mark.examples(2)
@pytest.mark.parametrize("dtype", ("int8", "int32", "uint8"))
def test_integers(dtype):
    w = np.array([[-1, 0, 1, 1], [1, -1, 0, 0]]) % (2 if dtype == "uint8" else 3)
    w = (w - (0 if dtype == "uint8" else 1)).astype(dtype)
    for given in (w, jnp.asarray(w)):
        q = eqq.quantize(given, eqq.Ternary())
        assert q.dtype == jnp.float32
        np.testing.assert_array_equal(q.dequantize(), w)
    q = jax.jit(lambda w: eqq.quantize(w, eqq.Ternary()))(w)
    np.testing.assert_array_equal(q.dequantize(), w)
    signs = np.array([[-1, 1], [1, 1]], "int8")
    np.testing.assert_array_equal(eqq.quantize(signs, eqq.Binary()).dequantize(), signs)


# Of booleans, it is not said what numbers they are. Others round no integers.
def test_what_is_no_number():
    for format in (eqq.Ternary(), eqq.Binary()):
        with raises(TypeError, "w", "floating-point dtype, or one of integers", "bool"):
            eqq.quantize(np.ones((4, 4), bool), format)
    with raises(TypeError, "w", "floating-point dtype", "int8"):
        eqq.quantize(np.ones((4, 4), "int8"), eqq.NF4())


# A part of the contracted axis ends within a byte or a block: what would not.
@pytest.mark.parametrize(
    "format, other",
    [
        (eqq.Ternary(), "Ternary(radix=4)"),
        (eqq.Ternary(scale="tensor"), 'Ternary(scale="tensor", radix=4)'),
        (eqq.Ternary(96), "Ternary(64, radix=4)"),
        (eqq.NF4(96), "NF4()"),
        (eqq.Int8(96), "Int8(64)"),
        (eqq.formats.Q4_K(), None),
    ],
    ids=str,
)
def test_formats_that_can_be_split(format, other):
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    w = jax.device_put(normal(256, 256), NamedSharding(mesh, P("a")))
    with raises(ValueError, "sharding", "Got P") as info:
        eqq.quantize(w, format)
    text = str(info.value)
    assert "cut through" in text and ("Or take" in text) == (other is not None)
    assert other is None or f"Or take the format {other}" in text
