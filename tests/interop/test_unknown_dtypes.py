"""A tensor of an unknown type does not keep the others from being read."""

import json
import struct

import numpy as np
import pytest

from eqquant import interop
from eqquant._cli import main


_others = np.arange(8, dtype=np.float32).reshape(2, 4)


def _safetensors(folder):
    header = {
        "a": {"dtype": "F99_E9M9", "shape": [3, 5], "data_offsets": [0, 7]},
        "b": {"dtype": "F32", "shape": [2, 4], "data_offsets": [7, 39]},
    }
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    data = len(text).to_bytes(8, "little") + text + b"unknown" + _others.tobytes()
    path.write_bytes(data)
    return path, "F99_E9M9"


def _gguf(folder):
    def info(name, shape, type, offset):
        sizes = b"".join(struct.pack("<Q", n) for n in reversed(shape))
        start = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
        return start + sizes + struct.pack("<IQ", type, offset)

    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 0)
    head += info(b"a", (3, 5), 99, 0) + info(b"b", (2, 4), 0, 32)
    head += bytes(-len(head) % 32)
    path = folder / "model.gguf"
    path.write_bytes(head + bytes(32) + _others.tobytes())
    return path, "type 99"


@pytest.mark.parametrize("write", [_safetensors, _gguf])
def test_others_are_read(write, tmp_path, capsys):
    path, kind = write(tmp_path)
    with interop.open(path) as checkpoint:
        assert list(checkpoint) == ["a", "b"]
        assert checkpoint.entries["a"].shape == (3, 5)
        np.testing.assert_array_equal(checkpoint["b"], _others)
        with pytest.raises(ValueError, match=f"'a' is of {kind}, which"):
            checkpoint["a"]
        with pytest.raises(ValueError, match="'a' should be of float64"):
            interop.load_into({"a": np.ones((3, 5)), "b": _others}, checkpoint)
    assert main(["inspect", str(path)]) == 0
    assert kind in capsys.readouterr().out
    out = path.with_stem("out")
    assert main(["quantize", str(path), str(out)]) == 2
    assert f"'a' is of {kind}, which cannot be read" in capsys.readouterr().err
