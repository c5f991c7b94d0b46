import dataclasses
import json
import pickle
import re
import zlib
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.extend.random
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import eqquant as eqq
from eqquant.formats import known_formats
from eqquant.interop import load, save

from ..helpers import normal
from .same import same


tree = {
    "w": eqq.quantize(normal(2, 4), "int8", axis=-1),
    "x": jnp.arange(3, dtype=jnp.bfloat16),
    "p": [0.5, True],
}


def _raises(path, match=""):
    """A `ValueError` that names the file, and says what is wrong."""
    return pytest.raises(ValueError, match=f"{re.escape(repr(str(path)))}: .*{match}")


def _rewrite(path, change):
    """Changes what a file says of itself, and keeps the checksum right."""
    with safetensors.safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        layout = json.loads(file.metadata()["eqquant"])
    change(layout, tensors)
    text = json.dumps(layout)
    checksum = f"{zlib.crc32(text.encode()):08x}"
    metadata = {"eqquant": text, "eqquant.crc32": checksum}
    safetensors.numpy.save_file(tensors, path, metadata)


#
# What cannot be loaded
#


def test_no_file(path):
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        load(path)


def test_folder(tmp_path):
    with pytest.raises(ValueError, match="no file of safetensors"):
        load(tmp_path)


def test_cut_short_anywhere(path):
    save(path, tree)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with _raises(path, "cut short" if size > 8 else "beginning of one"):
            load(path)
    path.write_bytes(whole + b"\0")
    with _raises(path):
        load(path)


def test_any_byte_of_the_header_changed(path):
    save(path, tree)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    undone = []
    for i in range(end):
        changed = bytearray(whole)
        changed[i] ^= 1 << i % 8
        path.write_bytes(changed)
        try:
            loaded = load(path)
        except ValueError as e:
            assert repr(str(path)) in str(e)
        else:
            assert same(loaded, tree)
            undone.append(chr(whole[i]))
    # Only white space may be another.
    assert set(undone) <= {" "}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text, not tensors\n" * 10,
        b"GGUF\x03\0\0\0" + bytes(100),
        b"\x89HDF\r\n\x1a\n" + bytes(100),
        pickle.dumps({"a": 1}),
        b"\xff" * 64,
    ],
)
def test_not_safetensors(content, path):
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=f"{re.escape(repr(str(path)))}: .*(neither|not write)"
    ):
        load(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_safetensors_of_others(metadata, path):
    safetensors.numpy.save_file({"a": np.ones(2)}, path, metadata)
    with _raises(path, r"`eqquant\.save` did not write it.*`eqquant\.interop\.open`"):
        load(path)


def test_later_version(path):
    save(path, tree)
    _rewrite(path, lambda layout, tensors: layout.update(version=3))
    with _raises(path, "has version 3.* up to version 2. Use a later version"):
        load(path)


@pytest.mark.parametrize("version", [0, "1", None, 1.5, True, []])
def test_version_that_is_none(version, path):
    save(path, tree)
    _rewrite(path, lambda layout, tensors: layout.update(version=version))
    with _raises(path, "metadata is damaged"):
        load(path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"version": 1}', "1"])
def test_metadata_that_is_none(text, path):
    checksum = f"{zlib.crc32(text.encode()):08x}"
    metadata = {"eqquant": text, "eqquant.crc32": checksum}
    safetensors.numpy.save_file({}, path, metadata)
    with _raises(path, "metadata is damaged"):
        load(path)


def test_checksum(path):
    safetensors.numpy.save_file({}, path, {"eqquant": '{"version": 1, "tree": null}'})
    with _raises(path, "checksum"):
        load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda layout, tensors: layout.pop("tree"),
        lambda layout, tensors: layout.update(tree={"array": "y"}),
        lambda layout, tensors: layout.update(tree={"quantized": "x"}),
        lambda layout, tensors: layout.update(tree={"other": []}),
        lambda layout, tensors: layout.update(arrays=[]),
        lambda layout, tensors: layout["arrays"]["x"].pop("dtype"),
        lambda layout, tensors: layout["arrays"]["x"].update(shape=3),
        lambda layout, tensors: layout["quantized"]["w"].pop("axis"),
        lambda layout, tensors: layout["quantized"]["w"].pop("row_axis"),
        lambda layout, tensors: layout["quantized"]["w"].update(format=None),
        lambda layout, tensors: layout["quantized"]["w"]["stored"]["dict"].pop(0),
    ],
)
def test_metadata_that_contradicts_itself(change, path):
    save(path, {"w": tree["w"], "x": tree["x"]})
    _rewrite(path, change)
    with _raises(path):
        load(path)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda tensors: tensors.pop("x"), "'x' should be"),
        (lambda tensors: tensors.pop("w.scale"), "'w.scale' should be"),
        (lambda tensors: tensors.update(y=np.ones(1)), "'y' should be None"),
        (lambda tensors: tensors.update(x=tensors["x"][:2]), "'x' .*3.*2"),
        (lambda tensors: tensors.update(x=tensors["x"][None]), "'x' .*3.*1, 3"),
        (
            lambda tensors: tensors.update(x=tensors["x"].view(np.float16)),
            "'x' .*BF16.*F16",
        ),
    ],
)
def test_tensors_that_are_others(change, match, path):
    save(path, tree)
    _rewrite(path, lambda layout, tensors: change(tensors))
    with _raises(path, match):
        load(path)


def test_shape_that_is_another(path):
    save(path, tree)
    _rewrite(path, lambda layout, _: layout["quantized"]["w"].update(shape=[4, 2]))
    with _raises(path, r"'w' should store codes of int8\[2,4\], and has int8\[4,2\]"):
        load(path)


def test_unknown_dtype(path):
    save(path, tree)
    _rewrite(path, lambda layout, _: layout["arrays"]["x"].update(dtype="float7"))
    with _raises(path, "unknown dtype, 'float7'"):
        load(path)


def test_unknown_implementation_of_keys(path):
    save(path, {"key": jr.key(0)})
    _rewrite(path, lambda layout, _: layout["arrays"]["key"].update(dtype="key:dice"))
    with _raises(path, 'unrecognized PRNG implementation "dice"'):
        load(path)


class Negated(eqq.AbstractFormat):
    block_size: int | None = eqx.field(default=None, static=True)
    extra: Any = eqx.field(default=None, static=True)
    bits: ClassVar[float] = 8

    def encode(self, w, scale=None):
        return {"codes": (-w).astype(jnp.int8)}

    def decode(self, stored, tail):
        return -stored["codes"].astype(jnp.float32)

    def shape(self, stored, tail):
        return stored["codes"].shape


def test_unknown_format(path, monkeypatch):
    save(path, {"w": eqq.quantize(normal(2, 4), Negated())})
    known = {name: cls for name, cls in known_formats().items() if cls is not Negated}
    monkeypatch.setattr("eqquant.formats._json.known_formats", lambda: known)
    with _raises(path, "no format 'Negated'.*Int8.*NF4.*import the module"):
        load(path)


def test_format_that_takes_other_fields(path):
    save(path, {"w": eqq.quantize(normal(2, 4), Negated())})

    def change(layout, tensors):
        layout["quantized"]["w"]["format"]["fields"]["colour"] = "red"

    _rewrite(path, change)
    with _raises(path, "'Negated' cannot be made of .*'colour': 'red'"):
        load(path)


def test_format_with_fields_that_it_refuses(path):
    save(path, {"w": eqq.quantize(normal(2, 4), "nf4")})

    def change(layout, tensors):
        layout["quantized"]["w"]["format"]["fields"]["block_size"] = 17

    _rewrite(path, change)
    with _raises(path, "'NF4' cannot be made of .*positive multiple of 16 .* Got 17"):
        load(path)


#
# What cannot be saved
#


@pytest.mark.parametrize(
    "leaf",
    [
        np.array(["text"]),
        np.array([object()]),
        np.array("2020-01-01", np.datetime64),
        np.zeros(2, [("a", np.float32)]),
        np.ones(3, ">f4"),
        np.ones(3, np.longdouble),
    ],
    ids=lambda leaf: str(leaf.dtype),
)
def test_dtypes_that_jax_does_not_have(leaf, path):
    with pytest.raises(ValueError, match="`m`, at `a.0`: .*dtype that JAX supports. G"):
        save(path, {"a": [leaf]})
    assert not path.exists()


@pytest.mark.parametrize("key", [b"a", 1j, frozenset(), ("a", b"b"), np.int32(1)])
def test_keys_that_cannot_be_written(key, path):
    with pytest.raises(ValueError, match="`m`, at `a`: the keys .* Got "):
        save(path, {"a": {key: 1}})
    assert not path.exists()


def test_keys_that_are_equal(path):
    class Same:
        pass

    jtu.register_pytree_with_keys(
        Same,
        lambda _: (((jtu.GetAttrKey("a"), 1), (jtu.GetAttrKey("a"), 2)), None),
        lambda aux, children: Same(),
    )
    with pytest.raises(ValueError, match="the keys of .*Same.* should differ"):
        save(path, [Same()])


def test_tracers(path):
    @jax.jit
    def f(x):
        save(path, {"x": x})

    with pytest.raises(ValueError, match="`x`: it is being traced.*outside of"):
        f(normal(2))
    with pytest.raises(ValueError, match="`0`: it is being traced"):
        jax.jit(lambda q: save(path, [q]))(tree["w"])
    assert not path.exists()


@pytest.mark.parametrize("leaf", [tree["x"], tree["w"]], ids=["dense", "quantized"])
def test_skeletons(leaf, path):
    with pytest.raises(ValueError, match="`a`: it should be an array, with "):
        save(path, {"a": eqx.filter_eval_shape(lambda: leaf)})


def test_quantized_array_of_other_things(path):
    mask = jtu.tree_map(lambda _: True, tree["w"])
    with pytest.raises(ValueError, match="`a`: it should be an array.*Got True"):
        save(path, {"a": mask})


@pytest.mark.parametrize("extra", [(1, 2), jnp.float32, len, b"a"])
def test_fields_that_cannot_be_written(extra, path):
    q = eqq.quantize(normal(2, 4), Negated(extra=extra))
    with pytest.raises(ValueError, match="`a`: .*its field `extra` should be .* Got "):
        save(path, {"a": q})
    assert not path.exists()


class Counting(Negated):
    extra: int = eqx.field(default=0, static=True, converter=lambda x: x + 1)


def test_format_that_does_not_come_back(path):
    q = eqq.quantize(normal(2, 4), Counting())
    with pytest.raises(ValueError, match="`a`: the format .* would load as"):
        save(path, {"a": q})


def test_two_formats_of_one_name(path, monkeypatch):
    q = eqq.quantize(normal(2, 4), Negated())
    known = {**known_formats(), "negated": eqq.Int8}
    monkeypatch.setattr("eqquant.formats._json.known_formats", lambda: known)
    with pytest.raises(ValueError, match="Negated.* has the same name as .*Int8"):
        save(path, [q])


@pytest.mark.parametrize("spec", [P(P.UNCONSTRAINED), P("a", unreduced=frozenset("b"))])
def test_shardings_that_cannot_be_declared(spec, path):
    q = dataclasses.replace(tree["w"], sharding=spec)
    with pytest.raises(ValueError, match="saved only by the names of its axes"):
        save(path, [q])


def test_key_of_an_implementation_without_a_name(path):
    zeros = lambda key, shape: jnp.zeros(shape, jnp.uint32)
    implementation = jax.extend.random.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: seed.astype(jnp.uint32).reshape(1),
        split=lambda key, shape: zeros(key, (*shape, 1)),
        random_bits=lambda key, width, shape: zeros(key, shape),
        fold_in=lambda key, data: key,
        name="nameless",
    )
    with pytest.raises(ValueError, match="if their implementation has a name"):
        save(path, {"key": jr.key(0, impl=implementation)})
