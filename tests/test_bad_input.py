import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq

from .helpers import native_formats, normal
from .raises import raises


pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("axis", (2, -3, (0, 2), (-3,)))
def test_axis_out_of_range(axis):
    with raises(ValueError, "axis", "between -2 and 1", r"shape \(64, 5\)"):
        eqq.quantize(normal(64, 5), axis=axis)


@pytest.mark.parametrize(
    "axis", (1.0, "0", None, True, [0], (0, "1"), (True, 0), np.True_, np.float32(0))
)
def test_axis_is_no_integer(axis):
    if axis is None:
        assert eqq.quantize(normal(64, 5), axis=None).axis == -2
        return
    with raises(TypeError, "axis", "an integer or a tuple of integers"):
        eqq.quantize(normal(64, 5), axis=axis)


@pytest.mark.parametrize("axis", (np.int64(-2), np.uint8(0), (np.int32(0),)))
def test_axis_of_numpy(axis):
    # The axis is static: Equinox warns of anything but Python's integers.
    q = eqq.quantize(normal(64, 5), axis=axis)
    assert q.axis == -2 and type(q.axis) is int
    model = {"w": normal(64, 64)}
    (q,) = eqq.tree_quantize(model, axis=axis).values()
    assert q.axis == -2 and type(q.axis) is int


@pytest.mark.parametrize("axis", ((0, 0), (0, -2), ()))
def test_axis_repeated_or_none(axis):
    with raises(ValueError, "axis", "at least one axis, and none twice"):
        eqq.quantize(normal(64, 5), axis=axis)


@pytest.mark.parametrize(
    "dtype", (jnp.int8, jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64)
)
def test_weights_that_are_not_floating_point(dtype):
    with raises(TypeError, "w", "floating-point", jnp.dtype(dtype).name):
        eqq.quantize(jnp.ones((64, 5), dtype))
    with raises(TypeError, "w", "floating-point"):
        jax.jit(eqq.quantize)(jnp.ones((64, 5), dtype))


@pytest.mark.parametrize("w", ([[1.0, 2.0]], ((1.0,),), 1.0, "abc", None, object()))
def test_weights_that_are_no_arrays(w):
    with raises(TypeError, "w", f"Got {type(w).__name__}"):
        eqq.quantize(w)


def test_weights_without_axes():
    for w in (jnp.array(1.0), np.float32(1), np.array(1, np.float32)):
        with raises((ValueError, TypeError), "w"):
            eqq.quantize(w)
    with raises(ValueError, "w", "at least one axis"):
        eqq.quantize(jnp.array(1.0))


def test_weights_that_are_quantized():
    q = eqq.quantize(normal(64, 5))
    with raises(TypeError, "w", "quantized already", "`dequantize`"):
        eqq.quantize(q)


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
@native_formats
def test_weights_that_are_not_finite(format, value):
    w = np.array(normal(64, 5))
    w[3, 2:4] = value
    with raises(ValueError, "w", "finite", "2 of its 320"):
        eqq.quantize(w, format)


def test_activation_that_is_no_format():
    for activation in (3, True, [eqq.Int8()]):
        with raises(TypeError, "activation", "a format such as"):
            eqq.quantize(normal(64, 5), activation=activation)
    with raises(TypeError, "activation", r"not a class.*write `Int8\(\)`"):
        eqq.quantize(normal(64, 5), activation=eqq.Int8)


# Products fold all rows there are into one matrix, so a scale that these share would
# depend on which they are.
def test_activation_that_rows_share():
    with raises(ValueError, "activation", "row"):
        eqq.quantize(normal(64, 5), activation=eqq.Ternary(scale="tensor"))


def test_contracted_sizes():
    q = eqq.quantize(normal(64, 5))
    for x in (normal(5), normal(3, 5), normal(2, 3, 5), normal(64, 1)):
        with pytest.raises(ValueError, match=r"of size (5|1) with one of size 64"):
            x @ q
        with pytest.raises(ValueError, match=r"of size (5|1) with one of size 64"):
            eqq.qmatmul(x, q)
    for x in (normal(64), normal(64, 5), normal(2, 64, 5)):
        with pytest.raises(ValueError, match=r"of size 5 with one of size 64"):
            q @ x
        with pytest.raises(ValueError, match=r"of size 5 with one of size 64"):
            eqq.qmatmul(q, x)
    with pytest.raises(ValueError, match="of size 5 with one of size 64"):
        jax.jit(lambda x, q: x @ q)(normal(3, 5), q)


def test_scalars_are_no_operands():
    q = eqq.quantize(normal(64, 5))
    for f in (lambda x: x @ q, lambda x: q @ x):
        with pytest.raises(ValueError, match="at least one axis"):
            f(jnp.array(1.0))
        for x in (1.0, [1.0] * 64, "abc", None):
            with pytest.raises(TypeError, match="unsupported operand"):
                f(x)


def test_leading_axes_that_do_not_broadcast():
    q = eqq.quantize(normal(3, 64, 5))
    with pytest.raises(ValueError, match=r"\(2,.*\(3,|[Ii]ncompatible shapes"):
        normal(2, 4, 64) @ q


def test_qmatmul():
    q = eqq.quantize(normal(64, 5))
    x = normal(3, 64)
    with raises(ValueError, "kernel", "'reference'", "Got 'nonsense'"):
        eqq.qmatmul(x, q, kernel="nonsense")
    with raises(ValueError, "kernel", "neither"):
        eqq.qmatmul(x, x.T, kernel="reference")
    with raises(ValueError, "precision", "highest", "Got 'very'"):
        eqq.qmatmul(x, q, precision="very")


def test_rules():
    model = {"w": normal(64, 64)}
    with raises(ValueError, "filter_spec", "nothing.like.it", "'w'"):
        eqq.tree_quantize(model, eqq.Rules([("nothing.like.it", "nf4")]))
    for rules in (["nf4"], [("*",)], [("*", "nf4", 3)], [None]):
        with raises(ValueError, "rules", "a pair"):
            eqq.Rules(rules)
    with pytest.raises(TypeError, match="a pattern"):
        eqq.Rules([(3, "nf4")])
    for rules in (None, 3):
        with raises(TypeError, "rules", "a sequence of pairs", f"Got {rules}"):
            eqq.Rules(rules)


@pytest.mark.parametrize("change", (eqq.tree_quantize, eqq.train.tree_fake_quantize))
def test_sizes_and_axes(change):
    model = {"w": normal(64, 64)}
    for size in ("a", None, True, [64]):
        with raises(TypeError, "min_size", "a number"):
            change(model, min_size=size)
    for axis in (None, 1.0, "last"):
        with raises(TypeError, "axis", "an integer or a tuple of integers"):
            change(model, axis=axis)
    for wrong in (
        lambda: eqq.train.save_quantized(jnp.tanh, min_size="a"),
        lambda: eqq.train.quantized_psum(model, "d", min_size="a"),
    ):
        with raises(TypeError, "min_size", "a number", "Got 'a'"):
            wrong()


def test_einsum_without_a_string():
    q, x = eqq.quantize(normal(64, 5)), normal(3, 64)
    for subscripts in (x, ["mk", "kn"], None):
        got = f"Got {type(subscripts).__name__}"
        with raises(TypeError, "subscripts", "a string such as", got):
            eqq.qeinsum(subscripts, x, q)


@pytest.mark.parametrize("change", (eqq.tree_quantize, eqq.train.tree_fake_quantize))
def test_prefixes(change):
    model = {"a": [normal(64, 64)], "b": normal(64, 64)}
    for spec in ([True], {"a": True}, {"a": [True, False], "b": True}, [("*", "nf4")]):
        with raises(ValueError, "filter_spec", "a prefix of the model", "`Rules`"):
            change(model, spec)
    for spec in (eqq.NF4, {"a": eqq.NF4, "b": None}):
        with raises(TypeError, "format", r"not a class.*write `NF4\(\)`"):
            change(model, spec)
    with raises(TypeError, "format", "a format such as"):
        change(model, float)


def test_prefix_of_shardings():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    with raises(ValueError, "specs", "a prefix of the model", "`Rules`"):
        eqq.tree_shard({"w": normal(64, 64)}, [("*", P())], mesh)


def test_neither_arrays_nor_functions():
    for x in (normal(3), {"w": eqq.quantize(normal(64, 5))}, None):
        with raises(TypeError, "q", "`tree_dequantize`", f"Got {type(x).__name__}"):
            eqq.dequantize(x)
    with raises(TypeError, "fn", "a function", "Got int"):
        eqq.implicit(3)


def test_astype():
    q = eqq.quantize(normal(64, 5))
    for dtype in (int, jnp.int8, bool, jnp.complex64):
        with raises(ValueError, "dtype", "floating-point"):
            q.astype(dtype)


def test_numpy_does_not_take_it():
    q = eqq.quantize(normal(64, 5))
    for convert in (np.asarray, np.array, lambda q: np.asarray(q, np.float32)):
        with pytest.raises(TypeError, match=r"`q\.dequantize\(\)`"):
            convert(q)
    matmul = lambda q: np.matmul(np.ones(64), q)
    for use in (np.exp, lambda q: np.add(q, 1), matmul):
        with pytest.raises(TypeError):
            use(q)
    # But some of its functions call the methods of what they are given.
    assert np.allclose(np.sum(q), np.sum(q.dequantize()))


def test_jax_does_not_take_it():
    # A product that would build the whole array does not come about by chance.
    q = eqq.quantize(normal(64, 5))
    for use in (
        jnp.asarray,
        jnp.exp,
        lambda q: jnp.dot(normal(3, 64), q),
        lambda q: jnp.matmul(normal(3, 64), q),
        lambda q: jnp.einsum("mk,kn->mn", normal(3, 64), q),
    ):
        with pytest.raises(TypeError):
            use(q)


def test_truth_and_conversions():
    q = eqq.quantize(normal(64, 5))
    with pytest.raises(ValueError, match="truth value"):
        bool(q)
    for convert in (int, float, complex):
        with pytest.raises(TypeError):
            convert(q)
    with pytest.raises(TypeError):
        q[0] = 1.0


def test_transposes():
    with raises(ValueError, ".T", "`.mT`", r"\(2, 64, 5\)"):
        _ = eqq.quantize(normal(2, 64, 5)).T
    with raises(ValueError, ".mT"):
        _ = eqq.quantize(normal(64)).mT
    with raises(ValueError, ".mT", "axis -3"):
        _ = eqq.quantize(normal(2, 64, 5), axis=0).mT


def test_sharding():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    q = eqq.quantize(normal(512, 16), eqq.NF4(128))
    # Half of a block would be on each device.
    with pytest.raises(ValueError, match="a block.*128.*Shard another axis"):
        q.with_sharding(NamedSharding(mesh, P("d")))
    with raises(ValueError, "sharding", "at most 2 entries"):
        q.with_sharding(NamedSharding(mesh, P(None, None, "d")))
    for sharding in ("d", mesh, 3, jax.devices()[0]):
        with raises(TypeError, "sharding", "NamedSharding"):
            q.with_sharding(sharding)
    with pytest.raises(ValueError):
        eqq.quantize(normal(512, 15)).with_sharding(NamedSharding(mesh, P(None, "d")))
    filters = eqq.quantize(normal(5, 4, 8, 8), axis=(-3, -2, -1))
    with pytest.raises(ValueError, match="only the first can be split"):
        filters.with_sharding(NamedSharding(mesh, P(None, None, None, "d")))


def test_nothing_changes():
    w = np.array(normal(64, 5))
    w[3, 3] = np.nan
    before = w.copy()
    with pytest.raises(ValueError):
        eqq.quantize(w)
    np.testing.assert_array_equal(w, before)
    q = eqq.quantize(normal(64, 5))
    leaves = [np.array(a) for a in jtu.tree_leaves(q)]
    for bad in (
        lambda: q.astype(int),
        lambda: np.asarray(q),
        lambda: normal(3, 5) @ q,
        lambda: q.with_sharding("d"),
    ):
        with pytest.raises((ValueError, TypeError)):
            bad()
    for old, new in zip(leaves, jtu.tree_leaves(q)):
        np.testing.assert_array_equal(old, new)
    assert (q.dtype, q.axis, q.sharding) == (jnp.float32, -2, None)


def test_dequantization_that_nobody_asked_for(monkeypatch):
    q = eqq.quantize(normal(64, 32))
    monkeypatch.setenv("EQQUANT_ON_DEQUANTIZE", "raise")
    for fn in (
        lambda: q + 1.0,
        lambda: 2.0 * q,
        lambda: q[1:, 2],
        lambda: q.transpose(1, 0)[:, 3],
        lambda: q @ q.T,
    ):
        with pytest.raises(RuntimeError, match=r"f32\[.*is dequantized, 0.00819 MB"):
            fn()
    normal(3, 64) @ q, q @ normal(32), q.dequantize()
    monkeypatch.setenv("EQQUANT_ON_DEQUANTIZE", "warn")
    with pytest.warns(UserWarning, match="for `add`"):
        assert np.array_equal(q + 1.0, q.dequantize() + 1.0)
