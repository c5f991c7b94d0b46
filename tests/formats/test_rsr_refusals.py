import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import normal
from .rsr import draw, every_kind


@every_kind
@pytest.mark.parametrize(
    "kwargs,kind_of_error,message",
    [
        ({"k": 0}, ValueError, "`k` should be from 1 to 12.* Got 0"),
        ({"k": 13}, ValueError, "`k` should be from 1 to 12.* Got 13"),
        ({"k": True}, TypeError, "`k` should be an integer.* Got True, of type bool"),
        ({"k": 8.0}, TypeError, "8.0"),
        ({"dtype": np.int8}, ValueError, "`dtype` should be a floating.* Got int8"),
        ({"dtype": "no"}, TypeError, "`dtype` should be a floating.* Got 'no'"),
    ],
)
def test_bad_formats(kind, kwargs, kind_of_error, message):
    with pytest.raises(kind_of_error, match=message):
        kind(**kwargs)


@pytest.mark.parametrize(
    "dtype,value",
    [
        (np.float32, 0.5),
        (np.float32, np.nan),
        (np.float32, -np.inf),
        (jnp.bfloat16, 0.5),
        (np.int8, 2),
        (np.uint8, 255),
        (np.int64, 2**32),
        (np.float64, 1 + 1e-12),
    ],
)
@every_kind
def test_other_numbers(kind, dtype, value):
    w = np.zeros((20, 7), dtype)
    w[3, 4] = value
    domain = "0 and 1" if kind is eqq.RSRBinary else "-1, 0 and 1"
    message = (
        rf"`w` should hold no numbers but {domain} for {kind.__name__}\(\). Of "
        f"its 140 numbers 1 are others, such as {w[3, 4]}. To round"
    )
    with pytest.raises(ValueError, match=message):
        eqq.quantize(w, kind())
    narrow = jnp.asarray(w)
    if narrow[3, 4] in (0, 1):  # as the last two, in 32 bits
        return
    with pytest.raises(ValueError, match=message):
        eqq.quantize(narrow, kind())
    # Closed over, `w` is known when the function is traced.
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: x @ eqq.quantize(narrow, kind()))(jnp.ones((2, 20)))


@every_kind
def test_other_numbers_when_traced(kind):
    w = draw(kind(), 3, 20, 7)
    quantize = eqx.filter_jit(lambda w: eqq.quantize(w, kind()).dequantize())
    mapped = eqx.filter_jit(jax.vmap(lambda w: eqq.quantize(w, kind()).dequantize()))
    for fn in (quantize, mapped):
        np.testing.assert_array_equal(fn(w), w)
        for value in (0.5, np.nan, 2, -2):
            with pytest.raises(RuntimeError, match="`w` should hold no numbers but"):
                jax.block_until_ready(fn(w.at[1, 3, 4].set(value)))


def test_minus_one_is_not_binary():
    with pytest.raises(ValueError, match="such as -1. "):
        eqq.quantize(jnp.full((4, 4), -1), "rsrbinary")


@every_kind
def test_bad_use(kind):
    with pytest.raises(TypeError, match="integers or booleans. Got dtype complex64"):
        eqq.quantize(jnp.zeros((4, 4), complex), kind())
    with pytest.raises(TypeError, match="a floating-point dtype. Got dtype int32"):
        eqq.quantize(jnp.zeros((4, 4), int), "int8")
    with pytest.raises(ValueError, match="`activation` should.* Got RSR.* 1 only"):
        eqq.quantize(normal(4, 4), "int8", activation=kind())
    with pytest.raises(ValueError, match="no scales in RSR"):
        kind().encode(jnp.zeros((4, 4)), jnp.ones((4, 1)))
    with pytest.raises(ValueError, match="scales that are not nested"):
        eqq.Nested(kind())
