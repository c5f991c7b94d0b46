import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqquant as eqq
from eqquant.formats import as_format, known_formats

from ..helpers import normal, trees_equal
from .rsr import draw, every_format, every_kind, integers, some_formats


# Each code is a number written in base two or three, the first digit the lowest. Those
# that are missing from the last code are zeros.
@pytest.mark.examples(8)
@every_format
def test_codes(format):
    k = 37
    w = np.asarray(draw(format, k, 7))
    q = eqq.quantize(w, format)
    base, low = len(format.domain), min(format.domain)
    number = -(-k // format.k)
    codes = np.zeros((number, 7), int)
    for i in range(number * format.k):
        digits = w[i].astype(int) - low if i < k else -low
        codes[i // format.k] += digits * base ** (i % format.k)
    assert list(q.stored) == ["codes"]
    np.testing.assert_array_equal(q.stored["codes"], codes)
    bits = next(b for b in (8, 16, 32) if base**format.k <= 2**b)
    assert q.stored["codes"].dtype == f"uint{bits}"
    assert format.bits == bits / format.k
    assert q.layout.tail == number * format.k - k
    assert q.nbytes == number * 7 * bits // 8
    np.testing.assert_array_equal(q.dequantize(), w)


shapes = st.sampled_from(
    [((1,), -1), ((33, 7), -1), ((130, 5), -2), ((2, 29, 3), 1), ((6, 3, 20), (0, 2))]
)
dtypes = st.sampled_from(
    [np.float32, jnp.bfloat16, np.float16, np.int8, np.int32, np.int64, np.float64]
)


@pytest.mark.examples(1)
@every_kind
@settings(max_examples=12)
@given(array=shapes, dtype=dtypes, k=st.integers(1, 12), concrete=st.booleans())
def test_round_trip(kind, array, dtype, k, concrete):
    shape, axis = array
    w = np.asarray(draw(kind(k), *shape)).astype(dtype)
    if concrete:
        w = jnp.asarray(w)
    q = eqq.quantize(w, kind(k), axis=axis)
    again = eqq.quantize(q.dequantize(), kind(k), axis=axis)
    expected = jnp.asarray(w).dtype
    expected = expected if jnp.issubdtype(expected, jnp.floating) else jnp.float32
    assert (q.shape, q.dtype) == (shape, expected)
    assert (q.dequantize().shape, q.dequantize().dtype) == (shape, expected)
    np.testing.assert_array_equal(np.asarray(q.dequantize(), np.float32), w)
    assert trees_equal(q, again)


@pytest.mark.examples(3)
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.uint32, np.int16])
@every_kind
def test_integers_and_booleans(kind, dtype):
    w = draw(eqq.RSRBinary(), 30, 7, dtype=dtype)
    q = eqq.quantize(w, kind())
    assert q.dtype == jnp.float32
    np.testing.assert_array_equal(q.dequantize(), np.asarray(w, np.float32))
    q = eqq.quantize(w, kind(dtype=jnp.bfloat16))
    assert q.dtype == q.dequantize().dtype == jnp.bfloat16
    assert (integers(2, 30, dtype=np.int32) @ q).dtype == jnp.bfloat16


@pytest.mark.examples(1)
@some_formats
def test_empty(format):
    for shape in ((0,), (0, 3), (3, 0)):
        for axis in range(-len(shape), 0):
            q = eqq.quantize(jnp.zeros(shape, np.int8), format, axis=axis)
            assert q.shape == q.dequantize().shape == shape
    assert np.all(jnp.ones((2, 0)) @ eqq.quantize(jnp.zeros((0, 3)), format) == 0)
    assert (jnp.ones((2, 3)) @ eqq.quantize(jnp.zeros((3, 0)), format)).shape == (2, 0)


@pytest.mark.examples(1)
@some_formats
def test_layout(format):
    w = draw(format, 4, 37, 20)
    q = eqq.quantize(w, format)
    assert trees_equal(q.mT.mT, q)
    assert trees_equal(q[1], eqq.quantize(w[1], format))
    assert trees_equal(q[1:3], eqq.quantize(w[1:3], format))
    np.testing.assert_array_equal(q.mT.dequantize(), w.mT)
    rows = eqq.quantize(w[0], format, axis=-1)
    np.testing.assert_array_equal(rows[5], w[0][5])
    ids = jnp.array([[3, 0], [36, 3]])
    np.testing.assert_array_equal(rows[ids], w[0][ids])
    np.testing.assert_array_equal(q[2][5], w[2][5])
    np.testing.assert_array_equal(q + 1.0, w + 1)
    assert q.astype(jnp.bfloat16).dequantize().dtype == jnp.bfloat16
    with pytest.raises(AttributeError, match="has no scales"):
        q.scale


@some_formats
def test_save_and_load(format, tmp_path):
    path = tmp_path / "q.safetensors"
    for axis in (-1, -2):
        q = eqq.quantize(draw(format, 37, 20, dtype=np.int8), format, axis=axis)
        tree = {"q": q, "v": eqq.quantize(draw(format, 30), format)}
        eqq.save(path, tree)
        assert trees_equal(eqq.load(path), tree)
        assert trees_equal(eqq.load(path, like=tree), tree)


def test_in_a_model():
    model = eqx.nn.MLP(40, 3, 64, 2, key=jr.key(0))
    where = lambda model: model.layers[1].weight
    signs = eqx.tree_at(where, model, jnp.sign(where(model)))
    rules = eqq.Rules([("layers.1.weight", "rsrternary")])
    quantized = eqq.tree_quantize(signs, rules)
    assert where(quantized).format == eqq.RSRTernary()
    x = normal(5, 40)
    assert jnp.allclose(jax.vmap(quantized)(x), jax.vmap(signs)(x), atol=1e-5)
    report = str(eqq.report(quantized, signs))
    assert "RSRTernary()" in report
    with pytest.raises(ValueError, match="`layers.1.weight`: `w` should hold no num"):
        eqq.tree_quantize(model, rules)


@every_kind
def test_names(kind):
    assert as_format(kind.__name__) == kind()
    assert known_formats()[kind.__name__.lower()] is kind
    assert not [name for name in known_formats() if name.startswith("abstract")]
    assert str(kind()) == f"{kind.__name__}()"
    assert str(kind(3)) == f"{kind.__name__}(3)"
    assert str(kind(3, "float16")) == f"{kind.__name__}(3, dtype=float16)"
    assert kind(3).block_size is None
    assert kind(3) == kind(3, np.float32) and hash(kind(3)) == hash(kind(3))
    assert kind(3) != kind(4) and kind(3) != kind(3, jnp.bfloat16)
