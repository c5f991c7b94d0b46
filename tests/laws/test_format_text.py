"""A format is the same one from itself, and from the ways to write it."""

import re
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import pytest

import eqquant as eqq
from eqquant._cli._values import format_from_text
from eqquant.bench import as_quantization
from eqquant.formats import as_format

from ..helpers import all_formats, formats


@all_formats
def test_as_it_is_printed(format):
    for text in (str(format), repr(format), f" {format}\n"):
        assert as_format(text) == format
        assert format_from_text(text) == format
        assert as_quantization(text).format == format
    assert as_format(f"eqq.{format}") == as_format(f"eqquant.{format}") == format


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("int8", "Int8()"),
        ("NF4(block_size=64)", "NF4()"),
        ("NF4(block_size=None)", "NF4(None)"),
        ("NF4(32, jnp.bfloat16)", "NF4(32, scale_dtype=bfloat16)"),
        ("Int4(64, False)", "Int4(symmetric=False)"),
        ("Int(2, 32, None)", "Int(2, 32)"),
        ("Int(4, 32, 'minimum')", 'Int(block_size=32, offset="minimum")'),
        ("Nested(NF4(64), scale=Int8(256))", "Nested()"),
        ("Nested(NF4(16), scale=Int8(32))", "Nested(NF4(16), Int8(32))"),
        ("FP8('e5m2')", "FP8(dtype=float8_e5m2)"),
        ("Own(None, -0.5)", "Own(clip=-0.5)"),
    ],
)
def test_one_spelling(text, shortest):
    assert str(as_format(text)) == shortest


_dtypes = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("name", _dtypes)
@pytest.mark.parametrize(
    "written",
    ["{}", "'{}'", "jnp.{}", "np.{}", "numpy.{}", "jax.numpy.{}", "ml_dtypes.{}"]
    + ["jnp.dtype('{}')", "np.dtype({})", "dtype('{}')"],
)
def test_dtypes(name, written):
    text = written.format(name)
    expected = eqq.NF4(64, scale_dtype=name)
    assert as_format(f"NF4(64, scale_dtype={text})") == expected
    nested = as_format(f"Nested(NF4(16), scale=Int8(32, scale_dtype={text}))")
    assert nested == eqq.Nested(eqq.NF4(16), scale=eqq.Int8(32, scale_dtype=name))


def test_where_formats_are_named():
    text = "NF4(32, scale_dtype=jnp.bfloat16)"
    format = eqq.NF4(32, scale_dtype=jnp.bfloat16)
    w = jnp.ones((64, 32))
    activated = eqq.quantize(w, text, activation="Int8(32)")
    assert (activated.format, activated.activation) == (format, eqq.Int8(32))
    assert eqq.tree_quantize([w], text)[0].format == format
    assert eqq.tree_quantize([w], format=text)[0].format == format
    rules = eqq.Rules([("*", text)])
    assert eqq.tree_quantize([w], rules)[0].format == format
    assert eqq.train.tree_fake_quantize([w], text)[0].format == format


class Own(eqq.AbstractFormat):
    block_size: int | None = eqx.field(default=None, static=True)
    clip: float = eqx.field(default=1.0, static=True)
    bits: ClassVar[float] = 16

    def encode(self, w, scale=None):
        raise NotImplementedError

    def decode(self, stored, tail):
        raise NotImplementedError

    def shape(self, stored, tail):
        raise NotImplementedError


def test_format_of_a_user():
    assert as_format("Own(16, clip=-0.5)") == Own(16, -0.5)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "(", "NF4(", "NF4(64", "NF4)", "4", "'nf4'", "nf4 int8", "a.b"),
        *("jnp.bfloat16", "bfloat16.NF4()", "NF5(64)", "os.NF4()", "NF4(foo=1)"),
        *("NF4(scale_dtype=torch.float16)", "NF4(scale_dtype=jnp.float8_e4m3fn)"),
        *("NF4(scale_dtype=jnp.dtype)", "NF4(*[64])", "NF4(**{'block_size': 64})"),
        *(
            "NF4(64)(64)",
            "NF4(64 + 64)",
            "NF4(-64)",
            "NF4(-'a')",
            "NF4('a')",
            "NF4(())",
        ),
        *("NF4(block_size=[64])", "lambda: 1", "NF4(64).bits", "nf4:int8", "NF4(\x00)"),
        *("NF4(__import__('os'))", "Nested(NF4(None))", "NF4(64); NF4(64)"),
    ],
)
def test_mistakes_are_told_in_a_sentence(text):
    with pytest.raises(ValueError) as e:
        as_format(text)
    message = str(e.value)
    assert "malformed" not in message and "ast." not in message
    assert re.match(r"A format should be|Unknown format name", message)


def test_all_formats_are_named():
    assert {type(format).__name__ for format in formats.values()} <= {
        name for name in vars(eqq.formats) if not name.startswith("_")
    }
