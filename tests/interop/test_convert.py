import json
import os
import signal
import subprocess
import sys

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant.interop import convert
from eqquant.interop._converting import _encode, _output
from eqquant.interop._converting._tree import nested

from ..helpers import normal
from . import large
from .same import same


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert") / "model"
    large.write(folder, 64, 96, 1, 64)
    return folder


def _quantized(source, format="nf4", dense=("embed", "norm")):
    """What is expected, by names."""
    arrays = dict(interop.open(source))
    return {
        name: x
        if any(word in name for word in dense)
        else eqq.quantize(x, format, axis=-1)
        for name, x in arrays.items()
    }


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _at(tree, name):
    for key in name.split("."):
        tree = tree[int(key) if isinstance(tree, list) else key]
    return tree


@pytest.mark.parametrize(
    "format, axis",
    (
        (eqq.NF4(), -1),
        (eqq.NF4(), -2),
        (eqq.Nested(eqq.NF4(16), scale=eqq.Int8(32)), -1),
        (eqq.Ternary(), -1),
        (eqq.Q4_0(), -1),
        (eqq.RSRTernary(), -1),
        # All rows share a scale.
        (eqq.Ternary(scale="tensor"), -1),
        (eqq.NVFP4(), -1),
    ),
)
def test_some_rows_at_a_time(format, axis, monkeypatch):
    # Three pieces, the last of which is short.
    monkeypatch.setattr(_encode, "_numbers", 400)
    w = normal(2, 9, 96) if axis == -1 else normal(2, 96, 9)
    w = jnp.sign(w) if isinstance(format, eqq.AbstractExact) else w
    shares = []
    q, error = _encode.encode(np.asarray(w), format, axis, shares.append)
    expected = eqq.quantize(w, format, axis=axis)
    for a, b in zip(jtu.tree_leaves(q.stored), jtu.tree_leaves(expected.stored)):
        b = b.swapaxes(-1, -2) if expected.row_axis == -1 else b
        assert np.array_equal(a, b) and a.dtype == b.dtype
    assert (q.shape, q.axis, q.tail) == (w.shape, axis, expected.tail)
    noise = np.asarray(expected.dequantize(), np.float64) - np.asarray(w, np.float64)
    assert np.isclose(error.noise, np.sum(noise**2), rtol=1e-5)
    assert np.isclose(error.signal, np.sum(np.square(w, dtype=np.float64)), rtol=1e-5)
    assert np.isclose(sum(shares), 1)


def test_the_file_that_save_writes(source, tmp_path):
    # Of several files, one; whose tree has the layers as a list.
    out = tmp_path / "out.safetensors"
    outcomes = convert(source, out, "nf4", rules=[("*.embed*", "int8")])
    expected = _quantized(source, dense=("norm",))
    name = "model.embed_tokens.weight"
    w = interop.open(source)[name]
    expected[name] = eqq.quantize(w, "int8", axis=-1)
    tree = eqq.load(out)
    assert isinstance(tree["model"]["layers"], list)
    assert all(same(_at(tree, name), x) for name, x in expected.items())
    eqq.save(tmp_path / "saved.safetensors", tree)
    assert out.read_bytes() == (tmp_path / "saved.safetensors").read_bytes()

    found = {outcome.name: outcome for outcome in outcomes}
    assert found.keys() == expected.keys()
    assert found["lm_head.weight"].bits_per_weight == 4.5
    ratio = eqq.report({"w": expected[name]}, {"w": w}).rows[0].sqnr
    assert ratio is not None
    assert np.isclose(found[name].sqnr, ratio, atol=1e-3)
    norm = found["model.norm.weight"]
    assert (norm.format, norm.sqnr, norm.reason) == (None, None, "a vector")


def test_several_files(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, "int8", shard_size=20_000)
    expected = _quantized(source, "int8")
    names = [name for name in os.listdir(out) if name.startswith("model-")]
    assert len(names) > 2
    # An array may be larger than what a file is to have.
    assert sum((out / name).stat().st_size > 22_000 for name in names) <= 2
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 64
    index = out / "model.safetensors.index.json"
    for path in (out, index):
        tree = eqq.load(path)
        assert all(same(_at(tree, name), x) for name, x in expected.items())
        checkpoint = interop.open(path)
        assert checkpoint.kind == "eqquant"
        assert set(checkpoint) == set(expected)
        assert all(same(checkpoint[name], x) for name, x in expected.items())
    for read in (eqq.load, interop.open):
        with pytest.raises(ValueError, match="one of several files.*index.json"):
            read(out / names[0])
    index.unlink()
    with pytest.raises(ValueError, match="no index"):
        eqq.load(out)


class _Model(eqx.Module):
    model: dict
    lm_head: eqx.nn.Linear


def test_into_a_model(source, tmp_path):
    shapes = large.shapes(64, 96, 1, 64)
    tree = nested({name: jnp.zeros(shape) for name, shape in shapes.items()})
    head = eqx.nn.Linear(64, 64, use_bias=False, key=jr.key(0))
    like = _Model(tree["model"], head)
    out = tmp_path / "out"
    convert(source, out, "nf4")
    model = eqq.load(out, like=like)
    expected = _quantized(source)["lm_head.weight"]
    assert same(model.lm_head.weight, expected)
    x = normal(64)
    assert np.array_equal(model.lm_head(x), expected @ x)


_program = """
import os, signal, sys
from eqquant.interop import convert
source, out, most = sys.argv[1:]
def progress(done, total, name):
    if done > float(most) * total:
        os.kill(os.getpid(), signal.SIGKILL)
convert(source, out, "nf4", shard_size=20_000, progress=progress)
"""


def test_killed(source, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    partial = tmp_path / "out.partial"
    expected = convert(source, other, "nf4", shard_size=20_000)
    for most, least in ((0.3, 2), (0.8, 6)):
        argv = [sys.executable, "-c", _program, source, out, str(most)]
        assert subprocess.run(argv).returncode == -signal.SIGKILL
        assert not out.exists()
        text = (partial / "eqquant.journal").read_bytes()
        assert len(text.splitlines()) > least
    for read in (eqq.load, interop.open):
        with pytest.raises(ValueError, match="unfinished output.*again"):
            read(partial)
        for path in (partial / "files").iterdir():
            with pytest.raises(ValueError, match="beginning of one"):
                read(path)
    begun = []
    outcomes = convert(
        source,
        out,
        "nf4",
        shard_size=20_000,
        progress=lambda done, total, name: begun.append(done / total),
    )
    assert begun[0] > 0.5
    assert outcomes == expected
    assert _files(out) == _files(other)
    assert not partial.exists()


def _until(name):
    """Ends the conversion at an array, and leaves what a kill would leave."""

    def progress(done, total, found):
        if found == name:
            raise KeyboardInterrupt

    return progress


def test_what_is_left(source, tmp_path):
    out, partial = tmp_path / "out", tmp_path / "out.partial"

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, "nf4", progress=_until("model.norm.weight"))

    # Of other options, or of another source.
    interrupted()
    for format in ("int8", eqq.NF4(32)):
        with pytest.raises(ValueError, match="out.partial.*options.*fresh"):
            convert(source, out, format)
    convert(source, out, "int8", fresh=True)
    assert interop.open(out)["lm_head.weight"].format == eqq.Int8()
    with pytest.raises(FileExistsError, match="there already"):
        convert(source, out, "int8")

    # A line of the journal is cut short; bytes of what it tells of are lost.
    out, partial = tmp_path / "second", tmp_path / "second.partial"
    interrupted()
    journal = partial / "eqquant.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines)[:-10])
    (path,) = (partial / "files").iterdir()
    data = bytearray(path.read_bytes())
    data[-3000:-1000] = bytes(2000)
    path.write_bytes(data)
    convert(source, out, "nf4")
    convert(source, tmp_path / "third", "nf4")
    assert _files(out) == _files(tmp_path / "third")


def test_killed_at_the_end(source, tmp_path, monkeypatch):
    out = tmp_path / "out.safetensors"

    def killed(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_output.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, "nf4")
    assert eqq.is_quantized(eqq.load(out)["lm_head"]["weight"])
    outcomes = convert(source, out, "nf4")
    assert all(x.sqnr is not None for x in outcomes if x.format is not None)
    assert os.listdir(tmp_path) == ["out.safetensors"]


def test_two_at_once(source, tmp_path):
    def progress(done, total, name):
        with pytest.raises(ValueError, match="by another process"):
            convert(source, tmp_path / "out", "nf4")

    convert(source, tmp_path / "out", "nf4", progress=progress)
