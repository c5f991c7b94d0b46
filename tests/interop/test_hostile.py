import json
import os
import pickle
import re
import tracemalloc

import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop

from ..helpers import normal
from . import files, fuzz


def _raises(path, match=""):
    name = re.escape(path.name)
    return pytest.raises(ValueError, match=re.compile(f"{name}.*{match}", re.DOTALL))


@pytest.mark.examples(5)
@pytest.mark.parametrize("kind", fuzz.kinds)
def test_changed_at_random(kind):
    opened, _ = fuzz.run(kind, 200, seed=1, reads=0.05)
    assert 0 < opened < 200


#
# Safetensors
#


def _entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _safetensors(header, data=bytes(8)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "header, match",
    [
        ({"a": _entry(shape=[10**18])}, "'a' should take 4000000000000000000 bytes"),
        ({"a": _entry(shape=[2**40, 2**40])}, "'a' is too large"),
        ({"a": _entry(shape=[0, 2**63])}, "'a' should have sizes"),
        ({"a": _entry(shape=[-2, -1])}, "'a' should have sizes"),
        ({"a": _entry(shape=[2.0])}, "'a' should have sizes"),
        ({"a": _entry(shape=[True, 2])}, "'a' should have sizes"),
        ({"a": _entry(shape="2")}, "'a' has an invalid shape"),
        ({"a": _entry(shape=[1] * 40 + [2])}, "'a' should have 32 axes"),
        ({"a": _entry(dtype="")}, "'a' should have a dtype"),
        ({"a": _entry(dtype="\x1b[2J")}, "'a' should have a dtype"),
        ({"a": _entry(dtype=["F32"])}, "'a' should have a dtype"),
        ({"a": _entry(offsets=[0, 10**18])}, "'a' should lie in the 8 bytes"),
        ({"a": _entry(offsets=[8, 0])}, "'a' should lie in"),
        ({"a": _entry(offsets=[-8, 0])}, "'a' should lie in"),
        ({"a": _entry(offsets=[0])}, "'a' should lie in"),
        ({"a": _entry(offsets=None)}, "'a' should lie in"),
        ({"a": _entry(shape=[1], offsets=[0, 4])}, "8 follow its header"),
        ({"a": _entry(), "b": _entry()}, "'a' and 'b' overlap"),
        ({"a": _entry() | {"more": 1}}, "'a' should have a dtype, a shape and off"),
        ({"a": {}}, "'a' should have a dtype"),
        ({"a": 1}, "'a' should have a dtype"),
        ({"a": _entry(), "__metadata__": {"b": 1}}, "metadata is not text"),
        (b"[]", "is neither of safetensors nor of GGUF"),
        (b"{]", "header is not JSON"),
        (b'{"a": 1, "a": 2}', "header has 'a' twice"),
        (b'{"\xff": 1}', "header is not JSON"),
        (b'{"a": ' + b"9" * 10**5 + b"}", "header is not JSON"),
        (b'{"a": ' + b"[" * 10**5 + b"}", "fewer keys and lists"),
        (b'{"a": ' + b"[" * 900 + b"}", "header should be nested 500 levels deep"),
        (b'{"a": ' + b"[" * 490 + b"}", "header is not JSON"),
        (b"{" + b'"a\\' * 10**5, "header is not JSON"),
    ],
)
def test_safetensors(header, match, path):
    path.write_bytes(_safetensors(header))
    with _raises(path, match):
        interop.open(path)


def test_cut_short_anywhere(path):
    files.save(path, {"a": np.ones(2, np.float32), "b": np.ones(3, np.int8)})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with _raises(path):
            interop.open(path)
    path.write_bytes(whole + b"\0")
    with _raises(path, "follow its header"):
        interop.open(path)


@pytest.mark.parametrize(
    "content", [b"", b"text" * 9, pickle.dumps([1]), b"PK\3\4" + bytes(90), bytes(90)]
)
def test_files_of_other_kinds(content, path):
    path.write_bytes(content)
    with _raises(path, "neither of safetensors nor of GGUF"):
        interop.open(path)


def _many(text, size=6 * 2**20 - 100):
    return text * (size // len(text))


@pytest.mark.parametrize(
    "header, most",
    [
        ((2**63).to_bytes(8, "little") + b"{", 1e6),
        ((100_000_001).to_bytes(8, "little") + b"{", 1e6),
        (_safetensors(b'{"a":' + _many(b"[]," * 20) + b"}"), 80e6),
        (
            _safetensors(b'{"a":[' + _many(b"[1,1,1,1,1,1,1,1,1],", 2**20) + b"1]}"),
            80e6,
        ),
        (_safetensors(b'{"a":"' + _many(b"\\") + b'"}'), 80e6),
        # The most for its size.
        pytest.param(
            _safetensors(b'{"a":[' + _many(b'{"a":12345},') + b"0]}"),
            150e6,
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["size", "large", "lists", "short-lists", "text", "objects"],
)
def test_memory(header, most, path):
    path.write_bytes(header)
    os.truncate(path, max(len(header), 2**27))
    tracemalloc.start()
    try:
        with _raises(path):
            interop.open(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most


#
# Several files
#


@pytest.fixture
def index(tmp_path):
    for i in (1, 2):
        files.save(tmp_path / f"{i}.safetensors", {f"w{i}": np.ones(i, np.float32)})
    return tmp_path / "model.safetensors.index.json"


def _index(path, weight_map):
    path.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.usefixtures("systems")
def test_index(index):
    _index(index, {"w1": "1.safetensors", "w2": "2.safetensors"})
    for path in (index, index.parent):
        assert list(interop.open(path)) == ["w1", "w2"]
    # Without it, all the files; but if there is one of the usual name, that.
    index.unlink()
    assert list(interop.open(index.parent)) == ["w1", "w2"]
    files.save(index.with_name("model.safetensors"), {"w": np.ones(1, np.float32)})
    assert list(interop.open(index.parent)) == ["w"]


@pytest.mark.parametrize(
    "name",
    [
        *("../1.safetensors", "/etc/passwd", "..", ".", "", "a/../../1.safetensors"),
        *("C:\\1.safetensors", "1\0", "sub/1.safetensors"),
        # On Windows, these are paths, devices, or a file of another name.
        *("C:1.safetensors", "..\\1.safetensors", "sub\\1.safetensors"),
        *("\\\\server\\share\\1.safetensors", "\\\\?\\C:\\1.safetensors"),
        *(
            "//server/share/1.safetensors",
            "1.safetensors:stream",
            "1.safetensors::$DATA",
        ),
        *("CON", "nul.safetensors", "Aux .safetensors", "com1.1.safetensors", "LPT²"),
        *("conout$", "1.safetensors.", "1.safetensors ", "...", " "),
    ],
)
def test_index_that_points_outside(name, index):
    _index(index, {"w1": name})
    with _raises(index, "should have files of its own folder.*'w1'"):
        interop.open(index)


def test_index_that_is_wrong(index):
    _index(index, {"w1": "1.safetensors", "w3": "2.safetensors"})
    with _raises(index, "'w3' in '2.safetensors', which has no such tensor"):
        interop.open(index)
    _index(index, {"w1": "3.safetensors"})
    with pytest.raises(FileNotFoundError, match="3.safetensors"):
        interop.open(index)
    for wrong in ([], {}, {"w1": 1}, None):
        _index(index, wrong)
        with _raises(index):
            interop.open(index)
    index.write_text("[]")
    with _raises(index, "should be a JSON object"):
        interop.open(index)


def test_tensor_in_two_files(index):
    files.save(index.with_name("2.safetensors"), {"w1": np.ones(2, np.float32)})
    _index(index, {"w1": "1.safetensors"})
    assert list(interop.open(index)) == ["w1"]
    _index(index, {"w1": "1.safetensors", "w2": "2.safetensors"})
    with pytest.raises(ValueError, match="both have a tensor 'w1'"):
        interop.open(index)


def test_folders(tmp_path):
    with _raises(tmp_path, "no file of safetensors or GGUF.*pytorch_model.bin"):
        interop.open(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        interop.write_gguf(tmp_path / name, {"w": normal(2)})
    with _raises(tmp_path, "has several models: 'a.gguf', 'b.gguf'"):
        interop.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        interop.open(tmp_path / "c.gguf")
    os.mkfifo(tmp_path / "pipe")
    with _raises(tmp_path / "pipe", "should be a file"):
        interop.open(tmp_path / "pipe")


#
# Parts that do not fit each other
#


def _without(suffix):
    return lambda tensors: {k: x for k, x in tensors.items() if not k.endswith(suffix)}


def _with(suffix, change):
    return lambda tensors: {
        k: change(x) if k.endswith(suffix) else x for k, x in tensors.items()
    }


@pytest.mark.parametrize(
    "make, change, match",
    [
        (files.gptq, _with("qzeros", lambda x: x[:, :-1]), "q_proj.weight'"),
        (files.gptq, _with("qzeros", lambda x: x[:-1]), "q_proj.weight' should have"),
        (files.gptq, _with("g_idx", lambda x: x + 1), "g_idx' should have groups"),
        (files.gptq, _with("g_idx", lambda x: x[1:]), "q_proj.weight' should have"),
        (files.gptq, _with("scales", lambda x: x[:, 1:]), "q_proj.weight'.*AWQ"),
        (files.awq, _with("qzeros", lambda x: x[:, 1:]), "up_proj.weight'"),
        (files.awq, _with("scales", lambda x: x[:2]), "up_proj.weight'"),
        (
            files.bitsandbytes,
            _without("absmax"),
            "weight' should have '.*absmax', of F32. Got nothing",
        ),
        (files.bitsandbytes, _without("quant_map"), "mlp.up_proj.weight' should have"),
        (
            files.bitsandbytes,
            _with("absmax", lambda x: x[1:]),
            "weight' should have 96",
        ),
        (files.bitsandbytes, _with("proj.weight", lambda x: x[1:]), "weight' should"),
        (files.bitsandbytes, _with("nf4", lambda x: x[1:]), "nf4' is not JSON"),
        (files.bitsandbytes8, _with("SCB", lambda x: x[1:]), "'h.0.q.weight' should"),
        (files.bitsandbytes8, _with("format", lambda x: x + 1), "rows in order"),
        (files.compressed, _without("shape"), "weight' should have '.*_shape', of I64"),
        (
            files.compressed,
            _with("shape", lambda x: x * 10**15),
            "weight' is too large",
        ),
        (files.compressed, _with("shape", lambda x: -x), "weight' should"),
        (files.compressed, _with("_scale", lambda x: x[1:]), "should have scales"),
        (files.mxfp4, _with("scales", lambda x: x[..., :-1]), "should have 16 bytes"),
        (files.nvfp4, _with("_scale", lambda x: x[:-1]), "a scale for each 16"),
    ],
)
def test_parts_that_do_not_fit(make, change, match, path):
    tensors, config, _ = make()
    files.save(path, change(tensors), config)
    with _raises(path, match):
        interop.open(path)


# As version 0.15 packed them: words hold whole codes.
def test_compressed_tensors_with_gaps(path):
    tensors, config, _ = files.compressed(40, 96, bits=8, size=None)
    (group,) = config["quantization_config"]["config_groups"].values()
    group["weights"]["num_bits"] = 7
    files.save(path, tensors, config)
    with _raises(
        path, r"weight' .* without gaps.* fit codes of \[8\] bits.* has \[7\]"
    ):
        interop.open(path)


def test_numbers_that_are_none(path):
    tensors, config, expected = files.bitnet()
    files.save(path, _with("weight", lambda x: x | 3)(tensors), config)
    (name,) = expected
    with pytest.raises(ValueError, match="up_proj.weight' has numbers other than -1"):
        interop.open(path)[name]
    tensors, _, expected = files.bitsandbytes()
    files.save(path, _with("quant_map", lambda x: x[::-1])(tensors))
    (name,) = expected
    with pytest.raises(ValueError, match="quant_map' has numbers that are not of nf4"):
        interop.open(path)[name]


def test_same_name_twice(path):
    tensors, config, expected = files.gptq()
    (name,) = expected
    files.save(path, tensors | {name: np.ones(2, np.int8)}, config)
    with _raises(path, "it has '.*q_proj.weight' twice"):
        interop.open(path)


def test_eqquant_namespace():
    assert eqq.interop is interop
