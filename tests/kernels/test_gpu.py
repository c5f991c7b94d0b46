import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AbstractMesh

import eqquant as eqq
from eqquant._product import _primitive as primitive
from eqquant.formats import AbstractComposite
from eqquant.kernels import choose
from eqquant.kernels._adapted import on_base
from eqquant.kernels.gpu._decoded import decoded
from eqquant.kernels.gpu._float import bfloat16_wgmma, swapped_wgmma
from eqquant.kernels.gpu._int8 import int8_dot, int8_wgmma
from eqquant.kernels.gpu._plan import copying_registers, plan, stages_of, width

from ..helpers import error, formats, normal


runs = jax.__version_info__ >= (0, 11, 2)
interpreted = pytest.mark.skipif(not runs, reason="needs JAX 0.11.2 to interpret")


def problem(x, q, product="matmul", platform="cuda"):
    leaves, treedef = jtu.tree_flatten(q.stored)
    return primitive.problem_of(
        x,
        *leaves,
        platform=platform,
        treedef=treedef,
        product=product,
        layout=q.layout,
        activation=q.activation,
        precision=None,
    )


def prepacked(n, k, format, activation=None):
    q = eqq.quantize(normal(n, k), format, axis=-1, activation=activation)
    return eqq.tree_prepack(q, platform="gpu")


def product(x, q):
    """With the kernel that a GPU would run, interpreted."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    found = problem(x, q)
    kernel = choose(found).kernel
    kernels = (bfloat16_wgmma, swapped_wgmma, int8_wgmma)
    fn = {fn.__name__: fn for fn in kernels}[kernel.name]
    interpreter = plgpu.InterpretGPUParams()
    fn = ft.partial(fn, interpret=interpreter)
    if isinstance(q.format, AbstractComposite):
        fn = on_base(fn)
    run = jax.jit(lambda x, stored: fn(x, stored, found))
    y = run(x, q.stored)
    assert y.dtype == x.dtype and y.shape == (x.shape[0], q.shape[0])
    return np.asarray(y, np.float64), kernel


# Rows that fill no piece, channels that fill none, blocks and bytes that are left over,
# parts of the contracted axis, and blocks that are shorter and longer than a step.
@pytest.mark.examples(1)
@interpreted
@pytest.mark.parametrize(
    "m, n, k, format, dtype",
    (
        (1, 260, 1088, eqq.NF4(64), jnp.bfloat16),
        (70, 70, 191, eqq.NF4(32, scale_dtype=jnp.bfloat16), jnp.bfloat16),
        (9, 72, 832, eqq.NF4(512), jnp.float16),
        (130, 70, 256, eqq.Int4(64), jnp.float32),
        (3, 70, 1024, eqq.Int4(128, symmetric=False), jnp.bfloat16),
        (2, 70, 128, eqq.Int4(None, symmetric=False), jnp.float32),
        (17, 70, 224, eqq.Int8(), jnp.bfloat16),
        (3, 70, 224, eqq.Int8(32, scale_dtype=jnp.float16), jnp.float32),
        (5, 70, 384, eqq.Ternary(scale="tensor"), jnp.float32),
        (140, 70, 382, eqq.Ternary(128), jnp.bfloat16),
        (3, 70, 256, eqq.Int(4, 32, "minimum"), jnp.bfloat16),
        (70, 70, 256, eqq.Int(8, 64, "zero_point"), jnp.float32),
        (2, 70, 256, eqq.Int(3, 64, "minimum", scale_dtype=jnp.float16), jnp.float32),
        (2, 70, 256, eqq.Int(6, None), jnp.float32),
        (3, 70, 256, eqq.FP8(), jnp.float32),
        (200, 6000, 64, eqq.FP8("e5m2", 32), jnp.bfloat16),
        (3, 70, 256, eqq.NVFP4(), jnp.float32),
        (3, 70, 256, eqq.MXFP4(), jnp.float32),
        (3, 70, 256, eqq.Nested(eqq.NF4(64), scale=eqq.Int8(32)), jnp.float32),
        (3, 70, 512, eqq.formats.Q4_K(), jnp.float32),
        (3, 70, 512, eqq.formats.Q6_K(), jnp.float32),
        (3, 70, 256, eqq.formats.Q8_0(), jnp.float32),
        (3, 70, 256, eqq.Binary(), jnp.float32),
    ),
    ids=str,
)
def test_errors_are_as_declared(m, n, k, format, dtype):
    q = prepacked(n, k, format)
    x = jnp.asarray(normal(m, k, seed=1), dtype)
    y, kernel = product(x, q)
    bound = kernel.error + float(jnp.finfo(dtype).eps)
    assert error(y, np.asarray(x, np.float64), q.mT.dequantize()) < bound


# As `quantize` lays them.
@pytest.mark.examples(1)
@interpreted
@pytest.mark.parametrize(
    "format", (eqq.Int(4, 64, "zero_point"), eqq.Ternary(), eqq.MXFP4()), ids=str
)
def test_contracted_axis_first(format):
    q, x = eqq.quantize(normal(256, 70), format), normal(9, 256, seed=1)
    assert q.layout.row_axis == -1
    y, kernel = product(x, q.mT)
    assert kernel.name == "swapped_wgmma"
    assert error(y, x, q.dequantize()) < kernel.error


@pytest.mark.examples(1)
@interpreted
@pytest.mark.parametrize("m, dtype", ((1, jnp.float32), (130, jnp.bfloat16)))
def test_rounded_activations(m, dtype):
    q = prepacked(197, 224, eqq.Int8(), eqq.Int8())
    x = jnp.asarray(normal(m, 224, seed=1), dtype)
    rounded = eqq.quantize(x.astype(jnp.float32), "int8", axis=-1).dequantize()
    y, kernel = product(x, q)
    bound = kernel.error + float(jnp.finfo(dtype).eps)
    assert kernel.fn is int8_wgmma
    assert error(y, rounded, q.mT.dequantize()) < bound


@pytest.mark.thorough
@interpreted
def test_rounded_activations_of_other_formats():
    q = prepacked(70, 128, eqq.NF4(64), eqq.Int8())
    x = normal(3, 128, seed=1)
    rounded = eqq.quantize(x, "int8", axis=-1).dequantize()
    y, kernel = product(x, q)
    assert error(y, rounded, q.mT.dequantize()) < kernel.error


@interpreted
def test_stacked_weights():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    q, x = prepacked(70, 128, eqq.Int4(64)), normal(2, 3, 128, seed=1)
    found = problem(x[0], q)
    interpret = plgpu.InterpretGPUParams()
    both = jtu.tree_map(lambda a: jnp.stack([a, a[::-1]]), q.stored)
    fn = lambda x, stored: bfloat16_wgmma(x, stored, found, interpret)
    y = jax.vmap(fn)(x, both)
    w = q.mT.dequantize()
    assert error(y[0], x[0], w) < 8e-3
    assert error(y[1], x[1], w[:, ::-1]) < 8e-3


# A number that is not finite stays in its row.
@interpreted
def test_rows_are_apart():
    q, x = prepacked(70, 128, eqq.NF4(64)), normal(3, 128, seed=1)
    y, _ = product(x, q)
    z, _ = product(x.at[1, 7].set(jnp.nan), q)
    np.testing.assert_array_equal(y[[0, 2]], z[[0, 2]])
    assert np.all(np.isnan(z[1]))


# As of the decoded weight: what is infinite is so for all of a sum, or is not a number.
# The interpreter multiplies by NumPy, which warns of it on some machines.
@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("format", (eqq.NF4(64), eqq.Int8()), ids=str)
def test_not_finite(format):
    q, x = prepacked(70, 128, format), normal(3, 128, seed=1)
    x = x.at[1, 7].set(jnp.inf)
    bits = np.array(q.stored["scale"])
    bits[3, 0], bits[4, 0], bits[6, 0] = 0x7FFFFFFF, 0x7F800000, 0xFF800000
    leaves = jtu.tree_leaves(q.stored | {"scale": jnp.asarray(bits)})
    q = jtu.tree_unflatten(jtu.tree_structure(q), leaves)
    y, _ = product(x, q)
    with np.errstate(invalid="ignore"):
        exact = np.asarray(x, np.float64) @ np.asarray(q.mT.dequantize(), np.float64)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    np.testing.assert_array_equal(y[np.isinf(exact)], exact[np.isinf(exact)])


@pytest.mark.examples(4)
@pytest.mark.parametrize("name", ("nf4", "int8", "int4-affine", "ternary", "binary"))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_decoded(name, dtype):
    q = eqq.quantize(normal(130, 70), formats[name])
    for fn_of, q in (("matmul", q), ("matmul_transposed", q.mT)):
        x = jnp.asarray(normal(9, q.shape[0], seed=1), dtype)
        found = problem(x, q, fn_of)
        y = jax.jit(lambda x, stored: decoded(x, stored, found))(x, q.stored)
        assert y.dtype == dtype
        bound = 8e-3 + float(jnp.finfo(dtype).eps)
        assert error(y, np.asarray(x, np.float64), q.dequantize()) < bound


@pytest.mark.parametrize("platform", ("cpu", "gpu"))
def test_integers_by_xla(platform):
    q = eqq.quantize(normal(130, 70), "int8", activation="int8")
    x = normal(9, 130, seed=1)
    rounded = eqq.quantize(x, "int8", axis=-1).dequantize()
    q = eqq.tree_prepack(q, platform=platform)
    y = int8_dot(x, q.stored, problem(x, q))
    assert error(y, rounded, q.dequantize()) < 1e-5


def refusals(x, q, product="matmul"):
    """The kernel that a GPU would run, and what those before it say."""
    kernel, refused, _ = choose(problem(x, q, product))
    return kernel.name, {other.name: reason for other, reason in refused}


@pytest.mark.skipif(runs, reason="is for older JAX")
def test_older_jax():
    name, reasons = refusals(normal(9, 128), prepacked(64, 128, eqq.NF4(64)))
    assert name == "decoded"
    reason = f"needs JAX 0.11.2 or newer, got {jax.__version__}"
    assert reasons["bfloat16_wgmma"] == reasons["swapped_wgmma"] == reason
    q = prepacked(64, 128, eqq.Int8(), eqq.Int8())
    name, reasons = refusals(normal(1, 128), q)
    assert name == "int8_dot" and reasons["int8_wgmma"] == reason


@interpreted
@pytest.mark.parametrize(
    "m, k, format, reason",
    (
        (1025, 128, eqq.NF4(64), "is for at most 1024 rows, got 1025"),
        (0, 128, eqq.NF4(64), "needs non-empty operands"),
        (9, 160, eqq.NF4(32), "whose size is a multiple of 32 bytes, got 80"),
        (9, 128, eqq.NF4(16), "in blocks whose size is a power of two up to 256"),
        (9, 192, eqq.Int4(96), "or a multiple of 256, got Int4(96)"),
        (9, 128, eqq.Dynamic8(), "needs integers, 8-bit floats or a table of 16"),
        (9, 128, eqq.Int(4, ordered=True), "needs blocks of consecutive positions"),
    ),
)
def test_refused(m, k, format, reason):
    name, reasons = refusals(normal(m, k), prepacked(64, k, format))
    assert name == "decoded"
    assert reason in reasons["bfloat16_wgmma"]


@interpreted
def test_refused_layouts():
    hint = '`eqq.tree_prepack(model, platform="gpu")`'
    q = eqq.quantize(normal(128, 64), "nf4")
    name, reasons = refusals(normal(9, 128), q)
    assert name == "swapped_wgmma"
    assert "contracted axis last" in reasons["bfloat16_wgmma"]
    assert hint in reasons["bfloat16_wgmma"]
    q = eqq.tree_prepack(eqq.quantize(normal(128, 64), eqq.Int8()), platform="gpu")
    assert refusals(normal(1, 128), q)[0] == "bfloat16_wgmma"


@interpreted
def test_refused_weights_of_few_rows():
    name, reasons = refusals(normal(9, 128), prepacked(7, 128, eqq.NF4(64)))
    assert name == "decoded"
    assert "needs weights of at least 8 rows, got 7" in reasons["bfloat16_wgmma"]


def test_products_across_the_blocks_are_decoded():
    q = prepacked(64, 128, eqq.NF4(64))
    name, reasons = refusals(normal(9, 64), q, "matmul_transposed")
    assert name == "decoded"
    assert reasons == {"fused_sums": "is for at most 8 rows, got 9"}
    assert refusals(normal(8, 64), q, "matmul_transposed") == ("fused_sums", {})


def test_precision():
    found = problem(normal(1, 128), prepacked(64, 128, eqq.NF4(64)))
    found = dataclasses.replace(found, precision="highest")
    assert choose(found).kernel.name == "fused_sums"
    found = dataclasses.replace(found, rows=9)
    kernel = choose(found).kernel
    assert kernel.name == "decoded" and kernel.short_bound(found) <= 1e-5


# The device that a program is compiled for is that of the mesh.
@interpreted
@pytest.mark.parametrize(
    "kind, chosen",
    (
        ("NVIDIA H200", "bfloat16_wgmma"),
        ("NVIDIA H100 80GB HBM3", "bfloat16_wgmma"),
        ("NVIDIA GH200 480GB", "bfloat16_wgmma"),
        ("NVIDIA A100-SXM4-80GB", "fused_sums"),
        ("NVIDIA B200", "fused_sums"),
    ),
)
def test_devices(kind, chosen, monkeypatch):
    # (Where there is NVRTC, the others have a kernel that it compiles.)
    monkeypatch.setenv("EQQUANT_PTX", "0")
    device = jax.sharding.AbstractDevice(
        device_kind=kind, num_cores=132, platform="gpu"
    )
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    found = problem(normal(1, 128), prepacked(64, 128, eqq.NF4(64)))
    with jax.sharding.use_abstract_mesh(mesh):
        kernel, refused, _ = choose(found)
    assert kernel.name == chosen
    if chosen == "fused_sums":
        reasons = {reason for _, reason in refused if "NVRTC" not in reason}
        assert reasons.pop().endswith(f"9.0, such as an H100, got {kind}")
        assert not reasons


@given(
    m=st.integers(1, 1000),
    n=st.integers(8, 30000),
    j=st.integers(1, 2000).map(lambda i: 32 * i),
    p=st.sampled_from([1, 2, 4]),
    itemsize=st.sampled_from([2, 4]),
    block=st.sampled_from([None, 64, 256, 1024]),
    of_blocks=st.sampled_from([[4], [2], [4, 1]]),
)
def test_plans(m, n, j, p, itemsize, block, of_blocks):
    found = plan(m, n, j, p, itemsize, block, [] if block is None else of_blocks)
    # All of the contracted axis, and no part of nothing.
    assert found.steps * found.splits * found.bytes >= j
    assert found.steps * (found.splits - 1) * found.bytes < j
    assert 1 <= found.stages <= found.steps
    assert m <= found.rows or found.rows in (128, 256)
    assert found.stages >= min(2, found.steps)
    # Registers, of which each warpgroup is given a multiple of eight per thread.
    groups, launched = found.groups, 65536 // (128 * (found.groups + 1)) // 8 * 8
    wanted = (512 - copying_registers) // groups // 8 * 8
    assert copying_registers + groups * wanted <= launched * (groups + 1)
    # Steps and blocks are made of each other.
    step = found.bytes * p
    assert block is None or step % block == 0 or block % step == 0
    stage = found.channels * found.bytes + 2 * found.rows * step
    for nbytes in [] if block is None else of_blocks:
        stage += found.channels * max(16, nbytes * step // block)
    sums = found.channels * found.rows * (itemsize if found.splits == 1 else 4)
    # What a kernel may have of a multiprocessor, less some for barriers.
    assert found.stages * stage + sums <= 227 * 1024 - 4096


def test_rows_are_longer_than_tiles():
    assert [width(n, 64) for n in (1, 63, 64, 65, 72, 200)] == [72, 72, 72, 72, 72, 200]
    assert [width(n, 128) for n in (64, 128, 129)] == [136, 136, 136]


def test_one_stage_is_the_least():
    assert stages_of(3, 10**9, 0) == 1
