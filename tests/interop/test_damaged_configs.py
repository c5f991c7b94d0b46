"""A damaged `config.json` is an error where something depends on it, and only there."""

import re

import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop

from ..helpers import normal
from . import files


_good = b'{"dtype": "float32", "own": 1}'
_damaged = {
    "list": b"[1]",
    "comments": b"{} // of another program",
    "latin": '{"a": "\xe9"}'.encode("latin-1"),
    "twice": b'{"a": 1, "a": 2}',
    "large": b'{"a": "' + bytes(3 * 2**20) + b'"}',
    "deep": b'{"a": ' + b"[" * 10**5 + b"}",
    "empty": b"",
}


@pytest.fixture(params=_damaged)
def damaged(request, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(_damaged[request.param])
    return path


def test_own_files_do_not_need_it(damaged, path):
    x = {"a": normal(4, 3), "b": eqq.quantize(normal(32, 3), "int8")}
    eqq.save(path, x)
    np.testing.assert_array_equal(eqq.load(path)["a"], x["a"])
    with interop.open(path) as checkpoint:
        assert checkpoint["b"].format == eqq.Int8()
        with pytest.raises(ValueError, match=re.escape(repr(str(damaged)))):
            checkpoint.config.get("a")


@pytest.mark.parametrize("kind", ["dense", "gguf"])
def test_others_that_do_not_need_it(kind, damaged, path):
    x = normal(4, 3)
    if kind == "gguf":
        path = path.with_suffix(".gguf")
        interop.write_gguf(path, {"a": x})
    else:
        files.save(path, {"a": np.asarray(x)})
    with interop.open(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["a"], x)


def test_quantized_ones_need_it(damaged, path):
    tensors, _, _ = files.gptq()
    files.save(path, tensors)
    with pytest.raises(ValueError, match=re.escape(repr(str(damaged)))):
        interop.open(path)


def test_mark_of_the_encoding(path):
    tensors, config, expected = files.gptq()
    files.save(path, tensors, config)
    beside = path.with_name("config.json")
    beside.write_bytes(b"\xef\xbb\xbf" + beside.read_bytes())
    assert list(interop.open(path)) == list(expected)


def test_good_one(path):
    eqq.save(path, {"a": normal(4, 3)})
    path.with_name("config.json").write_bytes(_good)
    with interop.open(path) as checkpoint:
        assert dict(checkpoint.config) == {"dtype": "float32", "own": 1}
