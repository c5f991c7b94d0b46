"""Damaged headers of `eqquant.save` are refused when a file is loaded."""

import copy
import json
import time
import tracemalloc

import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop

from . import files, own


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "model.safetensors"
    eqq.save(path, own.tree())
    return path.read_bytes()


def _refused(path, data, layout, match: str | None = "its metadata is damaged"):
    path.write_bytes(own.with_layout(data, layout))
    for read in (eqq.load, interop.load_struct, interop.open):
        with pytest.raises(ValueError, match=match):
            read(path)


def test_whole_file(data, path):
    path.write_bytes(own.with_layout(data, own.layout_of(data)))
    own.check(path)


_deep = "[" * 10**5 + "]" * 10**5


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 2, "tree": ' + _deep + "}",
        '{"version": 2, "arrays": {}, "quantized": {}, "tree": ' + _deep + "}",
        '{"version": 2, "tree": [' + "[]," * 2**22 + "0]}",
        '{"version": 2, "tree": [' + '{"a":0},' * 2**21 + "0]}",
        '{"version": ' + "2" * 10**6 + "}",
        '{"version": 2, "version": 2}',
        "[2]",
        "2",
        "",
    ],
    ids=["deep", "deep-tree", "lists", "objects", "digits", "twice", "list", "2", ""],
)
def test_text(text, data, path):
    path.write_bytes(own.with_layout(data, text))
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(ValueError, match="its metadata is damaged"):
            eqq.load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 20
    assert peak < 1e7 + 8 * path.stat().st_size


def _set(key, value):
    return lambda q: q.__setitem__(key, value)


def _format(key, value):
    return lambda q: q["format"]["fields"].__setitem__(key, value)


def _without(key):
    def change(q):
        q["stored"]["dict"] = [x for x in q["stored"]["dict"] if x[0] != key]

    return change


@pytest.mark.parametrize(
    "name, change",
    [
        ("nf4", _set("stored", {"dict": []})),
        ("nf4", _set("stored", {})),
        ("nf4", _set("stored", None)),
        ("nf4", _without("scale")),
        ("int4", _without("zero_point")),
        ("nf4", lambda q: q["stored"]["dict"].append(["more", {"array": "bool"}])),
        ("nf4", lambda q: q["stored"]["dict"].append(q["stored"]["dict"][0])),
        ("nf4", _set("stored", {"dict": [["codes", {"list": []}], ["scale", 1]]})),
        ("int4", _format("symmetric", [])),
        ("int4", _format("symmetric", True)),
        ("int4", _format("block_size", 32)),
        ("int4", _format("block_size", "16")),
        ("int4", _format("scale_dtype", {"dtype": "bfloat16"})),
        ("int4", _format("scale_dtype", {"dtype": "x"})),
        ("int4", _format("scale_dtype", {"dtype": [1]})),
        ("nested", _format("scale", {"name": "NF4", "fields": {"block_size": 16}})),
        ("nested", _format("base", 1)),
        ("q4_k", _set("row_axis", -2)),
        ("nf4", _set("row_axis", 0)),
        ("nf4", _set("row_axis", True)),
        ("vector", _set("row_axis", -1)),
        ("nf4", _set("axis", -1)),
        ("nf4", _set("axis", 0)),
        ("nf4", _set("axis", [])),
        ("nf4", _set("axis", [[-1]])),
        ("filters", _set("axis", [-2, -3, -1])),
        ("filters", _set("inner", [5, 2])),
        ("filters", _set("inner", 10)),
        ("nf4", _set("tail", 0)),
        ("nf4", _set("tail", 1.0)),
        ("nf4", _set("shape", [6, 35])),
        ("nf4", _set("shape", [10**18, 10**18])),
        ("nf4", _set("shape", [])),
        ("nf4", _set("dtype", "int8")),
        ("nf4", _set("dtype", ["float32"])),
        ("nf4", _set("format", "nf4")),
        ("nf4", _set("format", {"name": "NF4", "fields": {"block_size": [16]}})),
        ("nf4", _set("format", {"name": "NF4", "fields": {"more": 16}})),
        ("nf4", _set("format", {"name": ["NF4"], "fields": {}})),
        ("nf4", _set("activation", 1)),
        ("nf4", _set("activation", {"name": "RSRBinary", "fields": {}})),
        ("nf4", _set("sharding", [["a"], "a"])),
        ("nf4", _set("sharding", ["a", None, None])),
        ("nf4", _set("sharding", [1])),
        ("nf4", _set("sharding", "ab")),
        ("nf4", _set("writable", 1)),
    ],
)
def test_quantized(name, change, data, path):
    layout = copy.deepcopy(own.layout_of(data))
    change(layout["quantized"][name])
    _refused(path, data, layout, None)


@pytest.mark.parametrize(
    "node",
    [
        [],
        "text",
        {},
        {"list": 1},
        {"list": {}},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [["a"]]},
        {"dict": [[{}, 1]]},
        {"dict": {"a": 1}},
        {"complex": [1]},
        {"complex": [1, "a"]},
        {"array": "none"},
        {"array": ["bool"]},
        {"quantized": "bool"},
        {"list": [], "dict": []},
        {"other": []},
    ],
    ids=str,
)
def test_tree(node, data, path):
    layout = own.layout_of(data)
    layout["tree"] = {"list": [layout["tree"], node]}
    _refused(path, data, layout)


@pytest.mark.parametrize(
    "array",
    [
        {"dtype": "bool"},
        {"dtype": "bool", "shape": 2},
        {"dtype": "bool", "shape": [2.0]},
        {"dtype": "bool", "shape": [-2]},
        {"dtype": ["bool"], "shape": [2]},
        {"dtype": "bool", "shape": [2], "numpy": "scalar"},
        {"dtype": "bool", "shape": [2], "numpy": ["array"]},
        {"dtype": "key:none", "shape": [2]},
        [],
    ],
    ids=str,
)
def test_arrays(array, data, path):
    layout = own.layout_of(data)
    layout["arrays"]["bool"] = array
    _refused(path, data, layout, None)


@pytest.mark.parametrize("byte", [2, 255])
def test_bool_of_other_bytes(byte, data, path):
    header, rest = own.read_header(data)
    start, end = header["bool"]["data_offsets"]
    path.write_bytes(
        own.with_header(header, rest[:start] + bytes([byte, 0]) + rest[end:])
    )
    for read in (eqq.load, lambda path: interop.open(path)["bool"]):
        with pytest.raises(
            ValueError, match=f"'bool' should have bytes of 0 and 1.*{byte}"
        ):
            read(path)


def test_what_cannot_be_loaded_is_not_saved(path):
    x = []
    for _ in range(300):
        x = [x]
    with pytest.raises(ValueError, match="nested 500 levels deep|too deeply nested"):
        eqq.save(path, x)
    assert not path.exists()
    x = []
    for _ in range(60):
        x = [x]
    eqq.save(path, x)
    assert eqq.load(path) == x


#
# Parts of other libraries' arrays that have another rank or dtype
#


@pytest.mark.parametrize("part", ["qzeros", "g_idx", "scales", "qweight"])
def test_gptq_with_a_scalar(part, path):
    tensors, config, _ = files.gptq(ordered=True)
    change = lambda k, x: x.reshape(-1)[0].reshape(()) if k.endswith(part) else x
    files.save(path, {k: change(k, x) for k, x in tensors.items()}, config)
    if part in ("scales", "qweight"):
        assert interop.open(path).kind == "safetensors"
        return
    with pytest.raises(ValueError, match="q_proj.weight' should have"):
        interop.open(path)


def test_packed_bytes_with_scales_of_floats(path):
    tensors = {
        "a.weight_packed": np.zeros((4, 16), np.uint8),
        "a.weight_scale": np.ones((4, 1), np.float32),
    }
    files.save(path, tensors)
    with pytest.raises(ValueError, match="a scale for each 32 numbers, of 8 bits"):
        interop.open(path)["a.weight"]


@pytest.mark.parametrize("kind", [[1], {}, 1, None])
def test_torchao_of_no_class(kind, path):
    about = {"a.weight": json.dumps({"_type": kind, "_data": {}})}
    header = {
        "__metadata__": about,
        "a._weight_qdata": {"dtype": "I8", "shape": [2, 4], "data_offsets": [0, 8]},
        "a._weight_scale": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    }
    path.write_bytes(own.with_header(header, bytes(16)))
    with pytest.raises(ValueError, match="should be one of torchao's"):
        interop.open(path)
