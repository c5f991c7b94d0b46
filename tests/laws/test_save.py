"""What `save` writes, `load` gives back: the same types, dtypes and bits, of JAX and of
NumPy, with 64 bits in JAX and without."""

import os

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq

from ..helpers import normal
from ..interop.same import bits


_of_numpy = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
_of_ml_dtypes = [
    *("bfloat16", "int2", "int4", "uint2", "uint4", "float8_e8m0fnu"),
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4"),
    *("float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz"),
]
_dtypes = [np.dtype(name) for name in _of_numpy]
_dtypes += [np.dtype(getattr(ml_dtypes, name)) for name in _of_ml_dtypes]


def same(a, b):
    """Whether two trees are, in all that a user could tell apart."""
    is_leaf = eqq.is_quantized
    leaves_a, treedef_a = jtu.tree_flatten(a, is_leaf=is_leaf)
    leaves_b, treedef_b = jtu.tree_flatten(b, is_leaf=is_leaf)
    return treedef_a == treedef_b and all(map(_same_leaf, leaves_a, leaves_b))


def _same_leaf(a, b):
    if isinstance(a, jax.Array):
        return isinstance(b, jax.Array) and _described(a) == _described(b)
    if type(a) is not type(b):
        return False
    if eqq.is_quantized(a):
        return jtu.tree_structure(a) == jtu.tree_structure(b) and same(
            a.stored, b.stored
        )
    if isinstance(a, np.ndarray | np.generic):
        return _described(a) == _described(b)
    return repr(a) == repr(b)


def _described(x):
    return x.shape, x.dtype, bits(x)


def _numbers(draw, dtype):
    shape = draw(st.sampled_from([(), (0,), (3,), (2, 5)]))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    if dtype.kind == "b" or dtype.itemsize == 1:
        return rng.integers(-2, 2, shape).astype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


@st.composite
def _leaves(draw):
    kind = draw(st.sampled_from(["array", "scalar", "jax", "quantized", "python"]))
    if kind == "python":
        return draw(st.booleans() | st.integers() | st.floats() | st.complex_numbers())
    if kind == "quantized":
        return _quantized[draw(st.sampled_from(sorted(_quantized)))]
    x = _numbers(draw, draw(st.sampled_from(_dtypes)))
    if kind == "scalar":
        return x.reshape(-1)[0] if x.size else x.dtype.type(1)
    return jnp.asarray(x) if kind == "jax" and _is_of_jax(x.dtype) else x


def _is_of_jax(dtype):
    if dtype.name.startswith(("float4", "float6")):
        return False  # XLA has none of these on CPUs.
    return jax.dtypes.canonicalize_dtype(dtype) == dtype


_quantized = {
    name: eqq.tree_prepack(eqq.quantize(normal(32, 4), name), platform="cpu")
    for name in ("nf4", "int8", "q8_0")
}
_trees = st.recursive(
    _leaves(),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.text("ab.", max_size=2), children, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.examples(1)
@pytest.mark.parametrize("x64", (False, True))
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_random_trees(x64, data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    with jax.enable_x64(x64):
        tree = data.draw(_trees)
        eqq.save(path, tree)
        assert same(eqq.load(path), tree)
        assert same(eqq.load(path, like=tree), tree)
        assert same(eqq.load(path, like=jtu.tree_map(_skeleton, tree)), tree)


def _skeleton(x):
    # As `eqx.filter_eval_shape` makes it.
    if not eqx.is_array(x):
        return x
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


@pytest.mark.parametrize("x64", (False, True))
@pytest.mark.parametrize("dtype", _dtypes, ids=str)
def test_every_dtype_of_numpy(dtype, x64, tmp_path):
    numbers = np.arange(-2, 2).astype(dtype)
    tree = {
        "array": numbers,
        "scalar": numbers[0],
        "none": numbers[:0],
        "0": numbers[0],
    }
    with jax.enable_x64(x64):
        eqq.save(tmp_path / "tree", tree)
        loaded = eqq.load(tmp_path / "tree")
        assert same(loaded, tree)
        assert same(eqq.load(tmp_path / "tree", like=loaded), tree)
        assert loaded["array"].flags.writeable and loaded["array"].flags.owndata


def test_the_kind_of_array_is_that_of_the_file(tmp_path):
    path = tmp_path / "tree"
    ours, theirs = [jnp.arange(3)], [np.arange(3, dtype=np.int32)]
    for tree in (ours, theirs):
        eqq.save(path, tree)
        for like in (ours, theirs, jax.eval_shape(lambda: ours)):
            assert same(eqq.load(path, like=like), tree)


def test_what_is_placed_is_of_jax(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("a",))
    like = jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("a")))
    eqq.save(tmp_path / "tree", np.arange(8, dtype=np.float32))
    loaded = eqq.load(tmp_path / "tree", like=like)
    assert same(loaded, jnp.arange(8.0)) and loaded.sharding == like.sharding


def test_numbers_of_jax_are_not_narrowed(tmp_path):
    path = tmp_path / "tree"
    with jax.enable_x64(True):
        tree = [jnp.asarray(1 + 2**-40)]
        eqq.save(path, tree)
    with pytest.raises(ValueError, match=r"float64.*jax\.enable_x64\(True\)"):
        eqq.load(path)
    with jax.enable_x64(True):
        assert same(eqq.load(path), tree)


def test_files_without_kinds_of_arrays(tmp_path, monkeypatch):
    # As they were written before there were any: all arrays come back as JAX's.
    monkeypatch.setattr("eqquant.interop._own._save.kind_of_numpy", lambda x: None)
    eqq.save(tmp_path / "tree", [np.ones(2, np.float32), np.float64(0.5)])
    assert same(eqq.load(tmp_path / "tree"), [jnp.ones(2), 0.5])


@pytest.mark.parametrize(
    "x",
    [
        np.ma.masked_array([1, 2], [True, False]),
        np.array(["text"]),
        np.array([None]),
        np.array("2020-01-01", np.datetime64),
        np.ones(2, ">f4"),
        np.zeros(2, [("a", "i4")]),
        np.longdouble(1),
        np.zeros((), jax.dtypes.float0),
    ],
    ids=lambda x: f"{type(x).__name__}-{x.dtype}",
)
def test_what_cannot_be_held_is_refused_before_a_file_is_written(x, tmp_path):
    with pytest.raises(ValueError, match=r"Could not save `m`, at `b`: it should"):
        eqq.save(tmp_path / "tree", {"a": np.arange(3), "b": x})
    assert os.listdir(tmp_path) == []
