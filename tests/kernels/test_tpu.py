import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec as P

import eqquant as eqq
import eqquant.kernels._table as table
import eqquant.kernels.tpu._tuning as tuning

from ..helpers import error, formats, native_formats, normal


# Kernels for a TPU, run by Pallas's interpreter. What they read beyond the end of an
# array is NaN there.


def quantize(w, format, activation=None):
    q = eqq.quantize(w, format, activation=activation)
    return eqq.tree_prepack(q, platform="tpu")


def problem_of(x, q):
    return dataclasses.replace(eqq.explain(x, q).problem, platform="tpu")


def kernels(problem):
    """All that do it, other than the reference."""
    return [
        kernel for kernel in table.supporting(problem) if kernel.name != "reference"
    ]


def interpreted(fn):
    """Quickly compiled, for that is most of the time."""
    fn = jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})

    def run(*args):
        with pltpu.force_tpu_interpret_mode():
            return fn(*args)

    return run


def as_function(kernel, problem):
    return interpreted(lambda x, stored: kernel.fn(x, stored, problem))


def check(x, q):
    """Holds every kernel against the product with the decoded weight."""
    w = np.asarray(q.dequantize(), np.float64)
    exact = np.asarray(x, np.float64)
    if q.activation is not None:
        rounded = eqq.quantize(x.astype(jnp.float32), q.activation, axis=-1)
        exact = np.asarray(rounded.dequantize(), np.float64)
    problem = problem_of(x, q)
    found = kernels(problem)
    for kernel in found:
        y = as_function(kernel, problem)(x, q.stored)
        assert y.shape == (x.shape[0], w.shape[1])
        assert y.dtype == x.dtype
        bound = kernel.error + float(jnp.finfo(x.dtype).eps)
        assert error(y, exact, w) < bound, kernel.name
    return [kernel.name for kernel in found]


# No tile divides these sizes, no block does, and no byte.
@pytest.mark.examples(1)
@native_formats
def test_both_products(format):
    if isinstance(format, eqq.Rotated):
        format = format.format  # whose kernels multiply what is rotated already
    q = quantize(normal(331, 203), format)
    found = check(normal(3, 331, seed=1), q)
    transposed = check(normal(5, 203, seed=2).astype(jnp.bfloat16), q.T)
    # (There is none for grids of 256 points, whose table is too long.)
    assert found and transposed or isinstance(format, eqq.Dynamic8)


@pytest.mark.thorough
def test_float16():
    q = quantize(normal(64, 40), "int4")
    assert check(normal(2, 64, seed=1).astype(jnp.float16), q)


# Several tiles along each axis.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("int8-32", "binary"))
def test_tiles(name, monkeypatch):
    for axis, size in dict(m=32, n=128, k=256).items():
        monkeypatch.setattr(tuning, f"tile_{axis}", size)
    q = quantize(normal(550, 300), formats[name])
    assert check(normal(40, 550, seed=1), q)
    assert check(normal(40, 300, seed=1), q.T)


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("int8", "int8-32", "ternary"))
@pytest.mark.parametrize("m", (2, 300))
def test_int8_activations(name, m):
    q = quantize(normal(130, 50), formats[name], "int8")
    names = check(normal(m, 130, seed=1), q)
    exact = formats[name].block_size is None or m == 2
    assert ("mosaic_int8_activations" in names) == exact


@pytest.mark.thorough
def test_other_activations():
    q = quantize(normal(96, 40), "int4", eqq.Int8(32))
    names = check(normal(2, 96, seed=1), q)
    assert names == ["mosaic_tiles", "mosaic_lookup_tiles"]
    assert check(normal(2, 40, seed=1), q.T) == [
        "mosaic_tiles_transposed",
        "mosaic_lookup_tiles_transposed",
    ]


# A row that is not finite, or large, says nothing of the others.
@pytest.mark.thorough
@pytest.mark.parametrize("name", ("int4", "int8"))
def test_rows_are_apart(name):
    q = quantize(normal(130, 70), name)
    x = normal(4, 130, seed=1)
    problem = problem_of(x, q)
    for kernel in kernels(problem):
        run = as_function(kernel, problem)
        y = run(x, q.stored)
        for wild in (1e6, np.inf, np.nan):
            z = run(x.at[1, 7].set(wild), q.stored)
            rest = np.array([0, 2, 3])
            np.testing.assert_array_equal(y[rest], z[rest])
            assert np.all(np.isfinite(z[1])) == np.isfinite(wild), kernel.name
        assert not np.any(run(jnp.zeros_like(x), q.stored))


# What is not finite comes out as of the decoded weight, and what is far larger than the
# rest hides nothing.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("int4", "int8", "nf4", "ternary-2-bits"))
def test_wild_numbers(name):
    w = normal(130, 70).at[5].set(0)
    q = quantize(w, formats[name])
    for q in (q, q.T):
        x = np.array(normal(6, q.shape[0], seed=1))
        x[0, 7], x[1, 7], x[2, 3:5] = np.inf, np.nan, (np.inf, -np.inf)
        x[3, 5] = x[4, ::40] = 1e6
        bits = np.array(q.stored["scale"])
        bits[0, 3], bits[0, 4], bits[0, 6] = 0x7FFFFFFF, 0x7F800000, 0xFF800000
        stored = q.stored | {"scale": jnp.asarray(bits)}
        problem = problem_of(jnp.asarray(x), q)
        decoded = jax.tree.unflatten(jax.tree.structure(q), jax.tree.leaves(stored))
        wide = np.asarray(decoded.dequantize(), np.float64)
        with np.errstate(invalid="ignore"):
            exact, near = x.astype(np.float64) @ wide, np.abs(x) @ np.abs(wide)
        finite = np.isfinite(exact)
        for kernel in kernels(problem):
            y = np.asarray(as_function(kernel, problem)(jnp.asarray(x), stored))
            # (Digits are for rows that are finite, and alike.)
            rows = np.array([1, 5]) if kernel.provided else np.arange(6)
            np.testing.assert_array_equal(np.isnan(y[rows]), np.isnan(exact[rows]))
            wild = np.isin(np.arange(6), rows)[:, None] & np.isinf(exact)
            np.testing.assert_array_equal(y[wild], exact[wild])
            some = np.isin(np.arange(6), rows)[:, None] & finite
            off = np.abs(y[some] - exact[some])
            assert np.all(off <= kernel.error * near[some])


# Experts: weights that differ, side by side.
@pytest.mark.thorough
def test_stack():
    q = quantize(normal(3, 96, 40), "int4")
    for q, k in ((q, 96), (q.mT, 40)):
        x = normal(3, 2, k, seed=1)
        problem = dataclasses.replace(problem_of(x[0], q[0]), stack=3)
        for kernel in kernels(problem):
            fn = jax.vmap(lambda x, stored: kernel.fn(x, stored, problem))
            y = interpreted(fn)(x, q.stored)
            for x_i, y_i, w_i in zip(x, y, q.dequantize()):
                assert error(y_i, x_i, w_i) < kernel.error


def abstract(format, k, n, axis=-2, **kwargs):
    weight = lambda: eqq.quantize(jnp.zeros((k, n)), format, axis=axis, **kwargs)
    return eqx.filter_eval_shape(weight)


def refused(x, q):
    problem = problem_of(x, q)
    every = [kernel for group in table._groups(problem) for kernel in group]
    found = {kernel.name: table._refusal(kernel, problem) for kernel in every}
    return {name: reason for name, reason in found.items() if name != "reference"}


def test_refusals():
    x = normal(2, 64)
    say = refused(x, eqq.quantize(normal(64, 40), "ternary"))["mosaic_integers"]
    assert "2 bits" in say and "tree_prepack(model, platform='tpu')" in say
    rows = eqq.tree_prepack(eqq.quantize(normal(64, 40), "nf4"), platform="gpu")
    say = refused(x, rows)
    assert all("tree_prepack(model, platform='tpu')" in text for text in say.values())
    say = refused(x, quantize(normal(64, 40), eqq.NF4(2048)))["mosaic_lookup"]
    assert "at most 1024" in say
    say = refused(normal(300, 64), quantize(normal(64, 40), "int4"))
    assert "at most 128 rows" in say["mosaic_integers"] and not say["mosaic_tiles"]
    say = refused(x, quantize(normal(64, 40), "binary"))["mosaic_lookup"]
    assert "4 bits" in say


def test_highest_precision():
    q = quantize(normal(64, 40), "int4")
    highest = dataclasses.replace(problem_of(normal(2, 64), q), precision="highest")
    assert not kernels(highest)
    q = quantize(normal(64, 40), "int4", "int8")
    highest = dataclasses.replace(problem_of(normal(2, 64), q), precision="highest")
    assert [kernel.name for kernel in kernels(highest)] == ["mosaic_int8_activations"]


# In one program for several platforms, there is a kernel for a TPU; and none for the
# CPU that it is traced on.
@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ("nf4", "int4-affine", "ternary-2-bits", "binary"))
def test_export(name):
    q = quantize(normal(256, 128), formats[name])
    loss = jax.value_and_grad(lambda x: jnp.sum((x @ q) ** 2))
    fn = jax.jit(lambda x: jax.vmap(loss)(x))
    x = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    exported = jax.export.export(fn, platforms=("cpu", "tpu"))(x)
    assert exported.mlir_module().count("tpu_custom_call") >= 2
    y, _ = jax.jit(exported.call)(normal(4, 256))
    assert y.shape == (4,)


# Under `shard_map`, which checks over which axes a result varies.
def test_shard_map():
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    q = abstract(eqq.Int4(64), 512, 256)

    def rows(x, q):
        return jax.lax.psum(x @ q, "x")

    specs = (P(None, "x"), P("x"))
    fn = jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=P())
    x = jax.ShapeDtypeStruct((4, 512), jnp.float32)
    lowered = jax.jit(fn).trace(x, q).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()
