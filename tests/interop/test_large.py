"""Files of models with very many tensors open, in bounded memory."""

import json
import tracemalloc

import numpy as np
import pytest

from eqquant import interop


_entry = {"dtype": "U8", "shape": [1]}


def _write(path, names):
    header = {
        name: _entry | {"data_offsets": [i, i + 1]} for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    data = bytes(i % 251 for i in range(len(names)))
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return len(text)


def _index(path, names, files):
    shards = {
        f"model-{i + 1:05}-of-{files:05}.safetensors": names[i::files]
        for i in range(files)
    }
    for file, part in shards.items():
        _write(path.with_name(file), part)
    index = {name: file for file, part in shards.items() for name in part}
    path.write_text(json.dumps({"weight_map": index}, indent=2))
    return path.stat().st_size


def _peak(path):
    tracemalloc.start()
    try:
        checkpoint = interop.open(path)
        return checkpoint, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("files", [0, 2], ids=["header", "index"])
def test_long_names(files, path):
    # As many bytes as the names of real models take, in fewer names.
    names = [f"{i:07}" * 2**11 for i in range(2**11 + 2**9)]
    if files:
        path = path.with_name("model.safetensors.index.json")
        assert _index(path, names, files) > 2**25
    else:
        assert _write(path, names) > 2**25
    with interop.open(path) as checkpoint:
        assert sorted(checkpoint) == names
        assert int(np.asarray(checkpoint[names[7]])[0]) == (7 // (files or 1)) % 251


def _experts(layers):
    kinds = ("codes", "scales", "zeros", "input_scale")
    return [
        f"model.language_model.layers.{i}.mlp.experts.{j}.{part}_proj.own_{kind}"
        for i in range(layers)
        for j in range(512)
        for part in ("gate", "up", "down")
        for kind in kinds
    ]


@pytest.mark.thorough
def test_header_of_300000_tensors(path):
    # 40 MB of header, which take 8 s and 300 MB: 1 kB to a tensor.
    names = _experts(48)
    assert _write(path, names) > 39e6
    checkpoint, peak = _peak(path)
    with checkpoint:
        assert list(checkpoint) == names
    assert peak < 400e6


@pytest.mark.thorough
def test_index_of_370000_tensors(path):
    # 41 MB of index, and as much in headers, which take 12 s and 290 MB. (Measured
    # once: to trace its memory takes minutes.)
    path = path.with_name("model.safetensors.index.json")
    names = _experts(60)
    assert _index(path, names, 8) > 40e6
    with interop.open(path) as checkpoint:
        assert set(checkpoint) == set(names)


def test_vocabulary_of_a_million(tmp_path):
    path = tmp_path / "model.gguf"
    lists = {
        key: np.arange(2**20 * more, dtype=np.int32)
        for key, more in (("scores", 1), ("types", 1), ("merges", 2))
    }
    interop.write_gguf(path, {"w": np.ones(1, np.float32)}, lists)
    with interop.open(path) as checkpoint:
        for key, value in lists.items():
            assert checkpoint.metadata[key][-1] == value[-1]
