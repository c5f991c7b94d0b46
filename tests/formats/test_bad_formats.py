import jax.numpy as jnp
import pytest

import eqquant as eqq

from ..helpers import normal
from ..raises import raises


pytestmark = pytest.mark.usefixtures("unchecked")


formats_of_blocks = (eqq.NF4, eqq.Int8, eqq.Int4, eqq.Ternary, eqq.Binary)


@pytest.mark.parametrize("format", formats_of_blocks)
@pytest.mark.parametrize("size", (0, -16, 24, 8, 1, 65, 2**31))
def test_block_size(format, size):
    with raises(ValueError, "block_size", "a positive multiple of 16", f"Got {size}"):
        format(size)


@pytest.mark.parametrize("format", formats_of_blocks)
@pytest.mark.parametrize("size", ("64", True, 64.0, [64], jnp.float32))
def test_block_size_is_no_integer(format, size):
    with raises(TypeError, "block_size", f"of type {type(size).__name__}"):
        format(size)


@pytest.mark.parametrize("format", formats_of_blocks)
@pytest.mark.parametrize("dtype", (jnp.float64, jnp.int8, jnp.float8_e4m3fn, "float"))
def test_scale_dtype(format, dtype):
    with raises(ValueError, "scale_dtype", "float32, bfloat16 or float16"):
        format(scale_dtype=dtype)


@pytest.mark.parametrize("dtype", ("nonsense", None, 3))
def test_scale_dtype_is_no_dtype(dtype):
    with raises(TypeError, "scale_dtype", f"Got {dtype!r}"):
        eqq.NF4(scale_dtype=dtype)
    for format in (eqq.FP8, eqq.MXFP8, eqq.RSRTernary):
        with raises(TypeError, "dtype", f"Got {dtype!r}"):
            format(dtype=dtype)


@pytest.mark.parametrize("value", ("no", 1, None, jnp.float32))
@pytest.mark.parametrize(
    "format, field",
    (
        (eqq.Int4, "symmetric"),
        (eqq.Int, "ordered"),
        (eqq.NVFP4, "inverse"),
        (eqq.Square4, "signed"),
        (eqq.Dynamic8, "dithered"),
    ),
)
def test_fields_that_are_true_or_false(format, field, value):
    with raises(TypeError, field, "True or False"):
        format(**{field: value})


@pytest.mark.parametrize(
    "function",
    (
        lambda name: eqq.quantize(normal(64, 5), name),
        lambda name: eqq.quantize(normal(64, 5), activation=name),
        lambda name: eqq.tree_quantize({"w": normal(64, 64)}, name),
        lambda name: eqq.tree_quantize({"w": normal(64, 64)}, format=name),
        lambda name: eqq.Rules([("*", name)]),
        lambda name: eqq.Nested(name),
        lambda name: eqq.Nested(scale=name),
    ),
)
def test_unknown_name_of_a_format(function):
    known = ("binary", "int4", "int8", "nested", "nf4", "ternary")
    with pytest.raises(ValueError, match=".*".join(["'nf5'", *known])):
        function("nf5")


@pytest.mark.parametrize("format", (None, 4, eqq.NF4, ["nf4"], object()))
def test_format_is_no_format(format):
    with raises(TypeError, "format"):
        eqq.quantize(normal(64, 5), format)


def test_nested():
    for base in (eqq.NF4(None), eqq.Int8()):
        with raises(ValueError, "base", "block size"):
            eqq.Nested(base)
    for nested in ({"base": eqq.Nested()}, {"scale": eqq.Nested()}):
        with raises(ValueError, *nested, "nested"):
            eqq.Nested(**nested)


def test_ternary():
    with raises(ValueError, "scale", "'channel' or 'tensor'", "Got 'row'"):
        eqq.Ternary(scale="row")
    with raises(ValueError, "rule", "'absmean' or 'threshold'", "Got 'median'"):
        eqq.Ternary(rule="median")
    with raises(ValueError, "block_size", "Got 64"):
        eqq.Ternary(64, scale="tensor")


def test_integers_of_any_width():
    for bits in (1, 9, 0):
        with raises(ValueError, "bits", "from 2 to 8", f"Got {bits}"):
            eqq.Int(bits)
    for bits in (4.0, True, "4"):
        with raises(TypeError, "bits", "an integer from 2 to 8"):
            eqq.Int(bits)
    with raises(ValueError, "offset", "'zero_point' or 'minimum'", "Got 'float'"):
        eqq.Int(4, offset="float")


def test_floats():
    for format in (eqq.FP8, eqq.MXFP8):
        with raises(ValueError, "dtype", "'e4m3'", "Got float16"):
            format("float16")
        with raises(TypeError, "dtype", "'e4m3'", "Got 'e3m4x'"):
            format("e3m4x")
        assert format(jnp.float8_e5m2) == format("e5m2")
    with raises(ValueError, "scale", "'channel' or 'tensor'", "Got 'row'"):
        eqq.FP8(scale="row")
    with raises(ValueError, "block_size", "Got 32"):
        eqq.FP8(block_size=32, scale="tensor")
    with raises(ValueError, "ties", "'even' or 'zero'", "Got 'up'"):
        eqq.MXFP4("up")
    with raises(ValueError, "base", "not nested"):
        eqq.Nested(eqq.NVFP4())
