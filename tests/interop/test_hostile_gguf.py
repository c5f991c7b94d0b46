import re
import struct

import pytest

from eqquant import interop

from ..helpers import normal


def _raises(path, match=""):
    name = re.escape(path.name)
    return pytest.raises(ValueError, match=re.compile(f"{name}.*{match}", re.DOTALL))


def _text(text):
    return struct.pack("<Q", len(text)) + text


def _info(name=b"a", shape=(2,), type=0, offset=0):
    axes = b"".join(struct.pack("<Q", n) for n in shape)
    head = _text(name) + struct.pack("<I", len(shape))
    return head + axes + struct.pack("<IQ", type, offset)


def _pair(key, type, value):
    return _text(key) + struct.pack("<I", type) + value


def _gguf(infos=(), pairs=(), data=bytes(64), version=3, counts=None):
    counts = (len(infos), len(pairs)) if counts is None else counts
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


_u32 = struct.Struct("<I").pack
_list = struct.Struct("<IQ").pack


@pytest.mark.parametrize(
    "content, match",
    [
        (_gguf(version=1), "GGUF file of version 1"),
        (_gguf(version=3 << 24), "for big-endian"),
        (_gguf(counts=(2**63, 0)), "number of tensors should be 9223372036854775808"),
        (_gguf(counts=(0, 2**63)), "number of metadata should be"),
        (_gguf([_info(shape=(10**18,))]), "'a' should lie in the file"),
        (_gguf([_info(shape=(2**40, 2**40))]), "'a' is too large"),
        (_gguf([_info(shape=(2**63,))]), "'a' should have sizes"),
        (_gguf([_info(shape=(1, 1, 1, 1, 1))]), "'a' should have 4 axes"),
        (_gguf([_info(type=4), _info(b"b")]), "'b' and 'a' overlap"),
        (_gguf([_info(type=4, offset=96)]), "'a' should lie in the file"),
        (_gguf([_info(type=2)]), "'a' should have rows of a multiple of 32.*Q4_0"),
        *(
            (_gguf([_info(shape=(128,), type=type)]), "a multiple of 256.*IQ")
            for type in (16, 17, 18, 19, 21, 22, 23, 29)
        ),
        (_gguf([_info(type=20)]), "a multiple of 32.*IQ4_NL"),
        (_gguf([_info(shape=(64,), type=41)]), "a multiple of 128.*Q1_0"),
        (_gguf([_info(offset=1)]), "'a' should lie at a multiple of 32"),
        (_gguf([_info(offset=64)]), "'a' should lie in the file"),
        (_gguf([_info(offset=2**64 - 32)]), "'a' should lie in the file"),
        (_gguf([_info(), _info()]), "the tensor 'a' twice"),
        (_gguf([_info(), _info(b"b")]), "'a' and 'b' overlap"),
        (_gguf([_info(b"\xff")]), "the name of a tensor should be text"),
        (_gguf(pairs=[_pair(b"k", 4, _u32(1))] * 2), "the metadata 'k' twice"),
        (_gguf(pairs=[_pair(b"k", 13, b"")]), "'k' has an unknown type, 13"),
        (
            _gguf(pairs=[_pair(b"k", 9, _list(9, 1))]),
            "'k' is a list of an unknown type",
        ),
        (_gguf(pairs=[_pair(b"k", 9, _list(4, 2**62))]), "'k' should be 4611686"),
        (_gguf(pairs=[_pair(b"k", 9, _list(8, 2**62))]), "'k' should be 4611686"),
        (_gguf(pairs=[_pair(b"k", 8, struct.pack("<Q", 2**62))]), "length of .*'k'"),
        (
            _gguf(pairs=[_pair(b"general.alignment", 4, _u32(24))]),
            "power of two. Got 24",
        ),
        (_gguf(pairs=[_pair(b"general.alignment", 4, _u32(0))]), "power of two. Got 0"),
        (_gguf(pairs=[_pair(b"general.alignment", 8, _text(b"8"))]), "Got '8'"),
    ],
)
def test_gguf(content, match, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with _raises(path, match):
        interop.open(path)


def test_gguf_cut_short_anywhere(tmp_path):
    path = tmp_path / "model.gguf"
    metadata = {"a": ["x", "y"], "b": [1, 2], "c": "z"}
    interop.write_gguf(path, {"w": normal(5)}, metadata)
    whole = path.read_bytes()
    # What comes after the numbers only fills up.
    for size in range(len(whole) - 12):
        path.write_bytes(whole[:size])
        with _raises(path):
            interop.open(path)


def test_gguf_of_a_type_that_is_not_read(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(_gguf([_info(shape=(256,), type=15)], data=bytes(320)))
    checkpoint = interop.open(path)
    with pytest.raises(ValueError, match="'a': it is of Q8_K, .* no format"):
        checkpoint["a"]


@pytest.mark.parametrize("heads", [None, 3, 0, -1, "2", [2], []])
def test_heads_that_are_wrong(heads, tmp_path):
    path = tmp_path / "model.gguf"
    metadata = {"general.architecture": "other"}
    metadata |= {} if heads is None else {"other.attention.head_count": heads}
    interop.write_gguf(path, {"blk.1.attn_q.weight": normal(8, 4)}, metadata)
    path.write_bytes(path.read_bytes().replace(b"other", b"llama"))
    with _raises(path, "'blk.1.attn_q.weight'"):
        interop.open(path)
