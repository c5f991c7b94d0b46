"""A program that was exported, or compiled, is the same program wherever it is loaded:
with quantized weights inside of it, and as its arguments and results."""

import pathlib
import pickle
import subprocess
import sys
from typing import ClassVar

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq

from ..helpers import formats, many_at_once, normal
from ..interop.same import same


def _again(exported):
    loaded = jax.export.deserialize(exported.serialize())
    assert (loaded.in_tree, loaded.out_tree) == (exported.in_tree, exported.out_tree)
    return loaded


@many_at_once
def test_formats(names):
    arrays = jax.jit(
        lambda w: {name: eqq.quantize(w, formats[name], axis=-1) for name in names}
    )(normal(32, 256))

    transposed = jax.jit(lambda qs: {name: q.mT for name, q in qs.items()})
    loaded = _again(jax.export.export(transposed)(arrays))
    assert same(loaded.call(arrays), transposed(arrays))


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q.mT,
        lambda q: q.astype(jnp.bfloat16),
        lambda q: q.with_sharding(P(None, ("a", "b"))),
        lambda q: eqq.quantize(q.dequantize(), "int8", activation="int8"),
        lambda q: eqq.quantize(q.dequantize(), "nf4", axis=(-2, -1)),
        lambda q: eqq.tree_prepack(q, platform="tpu"),
        lambda q: jtu.tree_map(lambda a: jnp.stack([a, a]), q),
    ],
)
def test_all_that_is_static(change):
    q = change(eqq.quantize(normal(128, 32), eqq.NF4(32)))
    same_again = jax.jit(lambda q: {"q": [q]})
    loaded = _again(jax.export.export(same_again)(q))
    assert same(loaded.call(q)["q"][0], q)


def test_64_bits():
    with jax.enable_x64(True):
        q = eqq.quantize(normal(32, 16, dtype=np.float64), "int8")
        exported = jax.export.export(jax.jit(lambda q: q))(q).serialize()
        assert jax.export.deserialize(exported).in_tree == jtu.tree_structure(
            ((q,), {})
        )
    with pytest.raises(ValueError, match=r"float64.*enable_x64\(True\)"):
        jax.export.deserialize(exported)


@pytest.mark.parametrize("type", (AxisType.Auto, AxisType.Explicit))
def test_sharding(type):
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("a", "b"), axis_types=(type, type))
    q = eqq.quantize(normal(64, 16), eqq.NF4(16))
    q = q.with_sharding(NamedSharding(mesh, P("b", "a")))
    with jax.set_mesh(mesh):
        same_again = jax.jit(lambda q: q)
        loaded = _again(jax.export.export(same_again)(q))
        assert same(loaded.call(q), q)


class Halved(eqq.AbstractFormat):
    """A user's own."""

    block_size: int | None = eqx.field(default=None, static=True)
    base: eqq.AbstractFormat = eqx.field(default=eqq.NF4(), static=True)
    bits: ClassVar[float] = 16

    def encode(self, w, scale=None):
        return {
            "codes": lax.bitcast_convert_type(w.astype(jnp.float16), jnp.uint16),
        }

    def decode(self, stored, tail):
        halves = lax.bitcast_convert_type(stored["codes"], jnp.float16)
        return halves.astype(jnp.float32)

    def shape(self, stored, tail):
        return stored["codes"].shape


def test_format_of_a_user():
    q = eqq.quantize(normal(32, 4), Halved(32, eqq.Nested(eqq.NF4(32))))
    transposed = jax.jit(lambda q: q.T)
    loaded = _again(jax.export.export(transposed)(q))
    assert same(loaded.call(q), q.T)


def test_format_that_would_not_be_found_again():
    class NF4(Halved):
        """Of another name, which is taken."""

    q = eqq.quantize(normal(32, 4), NF4())
    exported = jax.export.export(jax.jit(lambda q: q.T))(q)
    with pytest.raises(ValueError, match="could not be loaded"):
        exported.serialize()


_by_format = {
    "nf4": eqq.NF4(64),
    "nested": eqq.Nested(eqq.Int4(32), scale=eqq.Int8(32)),
    "rotated": eqq.Rotated(eqq.Int4(32)),
    "q4_k": eqq.formats.Q4_K(),
}


# As a server would: it has the programs and the weights, and imports the library.
# (A program that was read from the suite's cache cannot be written again.)
@pytest.mark.processes
@pytest.mark.optimized
def test_in_a_new_process(tmp_path):
    x = normal(3, 256)
    model = eqx.nn.MLP(256, 256, 256, depth=1, key=jr.key(0))
    inside = eqq.tree_quantize(model, "int8")
    arrays = {
        name: eqq.quantize(normal(256, 64), format)
        for name, format in _by_format.items()
    }
    programs = {
        "inside": (jax.jit(lambda x: jax.vmap(inside)(x)), (x,)),
        "argument": (
            jax.jit(lambda x, qs: {name: x @ q for name, q in qs.items()}),
            (x, arrays),
        ),
    }
    expected = {}
    for name, (fn, args) in programs.items():
        compiled = fn.lower(*args).compile()
        exported = jax.export.export(fn)(*args)
        (tmp_path / f"{name}.export").write_bytes(exported.serialize())
        executable = pickle.dumps(serialize_executable.serialize(compiled))
        (tmp_path / f"{name}.compiled").write_bytes(executable)
        expected[name] = {
            "compiled": jax.device_get(jtu.tree_leaves(compiled(*args))),
            "export": jax.device_get(jtu.tree_leaves(exported.call(*args))),
        }
    eqq.save(tmp_path / "args.safetensors", {"x": x, "arrays": arrays})
    (tmp_path / "expected").write_bytes(pickle.dumps(expected))
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _in_new_process, tmp_path],
        check=True,
        cwd=pathlib.Path(__file__).parents[2],
    )


_in_new_process = """
import pathlib, pickle, sys
import eqquant
import jax, jax.export
import numpy as np
from jax.experimental import serialize_executable

folder = pathlib.Path(sys.argv[1])
expected = pickle.loads((folder / "expected").read_bytes())
programs = {}
for name in ("inside", "argument"):
    compiled = pickle.loads((folder / f"{name}.compiled").read_bytes())
    compiled = serialize_executable.deserialize_and_load(
        *compiled, execution_devices=jax.devices()[:1]
    )
    exported = jax.export.deserialize((folder / f"{name}.export").read_bytes())
    programs[name] = {"compiled": compiled, "export": exported.call}
given = eqquant.load(folder / "args.safetensors")
x, arrays = given["x"], given["arrays"]
for name, args in {"inside": (x,), "argument": (x, arrays)}.items():
    for kind, fn in programs[name].items():
        # One is compiled anew, and as that process compiles.
        error = 0 if kind == "compiled" else 1e-5
        for a, b in zip(jax.tree.leaves(fn(*args)), expected[name][kind], strict=True):
            np.testing.assert_allclose(a, b, rtol=error, atol=error)
"""
