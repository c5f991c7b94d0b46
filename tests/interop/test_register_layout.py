"""A layout of a library that this package does not know, from outside of it."""

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop

from ..helpers import normal
from . import files
from .same import same


def _find(source):
    # Rows of int8 codes, and the scales of their groups, one row for each group.
    for name, codes in source.tensors.items():
        base = name.removesuffix(".int8")
        scales = source.get(f"{base}.scales", "F32")
        if base == name or codes.kind != "I8" or scales is None:
            continue
        yield _entry(base, codes, scales, source.config.get("group"))


def _entry(name, codes, scales, group):
    format = eqq.Int8(group)

    def to_array():
        stored = {"codes": codes.read(), "scale": scales.read().view(np.uint32).T}
        return interop.to_quantized(stored, format, codes.shape, jnp.float32)

    dtype = np.dtype(np.float32)
    sources = (codes, scales)
    return interop.Entry(name, codes.shape, dtype, format, "odd", sources, to_array)


def _parts(name, x):
    rows = interop.Rows(name, x, "odd")
    if not isinstance(rows.format, eqq.Int8):
        raise rows.refused("it has `Int8`")

    n, _ = rows.shape
    scales = lambda: rows.stored("scale").T
    return {
        f"{name}.int8": interop.Part("I8", rows.shape, lambda: rows.stored("codes")),
        f"{name}.scales": interop.Part("F32", (rows.groups, n), scales),
    }


def _config(formats):
    (group,) = {format.block_size for format in formats.values()}
    return {"quantization": {"group": group}}


interop.register_layout(
    "odd",
    _find,
    parts=_parts,
    config=_config,
    hints={"group": int, "order": ("rows", "columns")},
)


def _codes():
    codes = np.arange(-96, 96, dtype=np.int8).reshape(4, 48)
    return codes, 2.0 ** -np.arange(12, dtype=np.float32).reshape(4, 3)


def _model(path, config=None):
    codes, scale = _codes()
    tensors = {
        "up.int8": codes,
        "up.scales": scale.T,
        "norm": np.ones(3, np.float32),
    }
    files.save(path, tensors, config)
    return codes * np.repeat(scale, 16, axis=-1)


def test_open(tmp_path):
    path = tmp_path / "model.safetensors"
    w = _model(path, {"quantization": {"group": 16}})
    for layout in (None, "odd"):
        checkpoint = interop.open(path, layout)
        assert checkpoint.kind == "odd" and set(checkpoint) == {"up", "norm"}
        q = checkpoint["up"]
        assert q.format == eqq.Int8(16) and np.array_equal(q.dequantize(), w)
        assert np.array_equal(checkpoint["norm"], np.ones(3))
    skeleton = {"up": jnp.zeros((4, 48)), "norm": jnp.zeros(3)}
    assert same(interop.load_into(skeleton, checkpoint)["up"], q)


def test_hints(tmp_path):
    path = tmp_path / "model.safetensors"
    w = _model(path, {"quantization": {"group": 48}})
    checkpoint = interop.open(path, group=16, order=None)
    assert np.array_equal(checkpoint["up"].dequantize(), w)
    for hints, match in (
        ({"group": "16"}, "`group` should be of .*int.* Got '16'"),
        ({"order": "diagonal"}, "`order` should be 'rows' or 'columns'. Got 'diag"),
        ({"bits": 4}, "`bits` is not a hint for odd. Hints are group, order"),
    ):
        with pytest.raises(ValueError, match=match):
            interop.open(path, "odd", **hints)
    with pytest.raises(ValueError, match="no array in it has the layout 'gptq'"):
        interop.open(path, "gptq")
    with pytest.raises(
        ValueError, match="`layout` should be one of .*odd.* Got 'even'"
    ):
        interop.open(path, "even")
    with pytest.raises(ValueError, match="'gguf' is not one of safetensors files"):
        interop.open(path, "gguf")


def test_write(tmp_path):
    weights = {"up": eqq.quantize(normal(4, 64), eqq.Int8(16), axis=-1)}
    interop.write(tmp_path / "out", weights, "odd")
    assert same(interop.open(tmp_path / "out")["up"], weights["up"])
    packed = {"up": eqq.quantize(normal(4, 64), "nf4", axis=-1)}
    with pytest.raises(ValueError, match="'up', in NF4.* cannot be written for odd"):
        interop.write(tmp_path / "out", packed, "odd")
    with pytest.raises(ValueError, match="`layout` should be .*mlx.*`write_gguf`"):
        interop.write(tmp_path / "out", weights, "gguf")


def test_convert(tmp_path):
    weights = {"up": {"weight": normal(4, 64)}}
    eqq.save(tmp_path / "source.safetensors", weights)
    out = tmp_path / "out.safetensors"
    interop.convert(
        tmp_path / "source.safetensors", out, eqq.Int8(16), to="odd", min_size=1
    )
    found = interop.open(out)["up.weight"]
    assert same(found, eqq.quantize(weights["up"]["weight"], eqq.Int8(16), axis=-1))


def test_names_are_registered_once():
    with pytest.raises(ValueError, match="`name` should be new. Got 'odd'"):
        interop.register_layout("odd", _find)
