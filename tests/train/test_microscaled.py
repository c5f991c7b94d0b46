import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

import eqquant as eqq
from eqquant.train import tree_compute
from eqquant.train._low_precision import _microscaled
from eqquant.train._low_precision._microscaled import elements, microscaled, scaled
from eqquant.train._low_precision._operand import as_operand

from ..helpers import normal
from ..sharding.meshes import mesh, put


formats = {  # with the dtypes of elements and of scales
    "mxfp8": (eqq.MXFP8(), "f8E4M3FN", "f8E8M0FNU"),
    "mxfp8-e5m2": (eqq.MXFP8("e5m2"), "f8E5M2", "f8E8M0FNU"),
    "mxfp4": (eqq.MXFP4(), "f4E2M1FN", "f8E8M0FNU"),
    "nvfp4": (eqq.NVFP4(), "f4E2M1FN", "f8E4M3FN"),
    "nvfp4-inverse": (eqq.NVFP4(inverse=True), "f4E2M1FN", "f8E4M3FN"),
}
x, w = (np.array(normal(2, n, 64, seed=n)) for n in (3, 5))
# With rows of very different sizes, and a block of zeros.
x = x * np.array([1e-6, 1, 1e6], np.float32)[:, None]
x[:, 0, :32] = 0


def compiled_for(kind):
    device = jax.sharding.AbstractDevice(
        device_kind=kind, num_cores=148, platform="gpu"
    )
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def low(w, format):
    return tree_compute({"w": w}, forward=format, axis=-1, min_size=0)["w"]


def wide(operand):
    """What is handed over, as `ml_dtypes` reads it, in float64."""
    numbers, scale = (np.asarray(a).astype(np.float64) for a in elements(operand))
    of_all = 1
    if isinstance(operand.layout.format, eqq.NVFP4):
        of_all = np.asarray(operand.stored["global_scale"]).view(np.float32)
        of_all = of_all.astype(np.float64)
        of_all = 1 / of_all if operand.layout.format.inverse else of_all
    size = numbers.shape[-1] // scale.shape[-1]
    return numbers * np.repeat(scale, size, -1) * of_all


# The numbers of the operands, and of the product, that a device is asked for.
@pytest.mark.examples(2)
@pytest.mark.parametrize("name", formats)
def test_against_float64(name):
    format, *_ = formats[name]
    dense, product = (
        jax.jit(fn)
        for fn in (
            lambda x, w: x @ low(w, format).mT,
            lambda x, w: scaled(x, w, 1, jnp.float32),
        )
    )
    a, b = (as_operand(jnp.asarray(v), format) for v in (x, w))
    wanted = np.einsum("brk,bnk->brn", wide(a), wide(b))
    size = np.einsum("brk,bnk->brn", np.abs(wide(a)), np.abs(wide(b)))
    for found in (dense(x, w), product(a, b)):
        assert np.all(np.abs(found - wanted) <= 1e-6 * size)
    assert np.all(size[:, -1] > 0)
    # It is near the product in float32, and not the same.
    exact = np.einsum("brk,bnk->brn", *map(np.float64, (x, w)))
    error = np.linalg.norm(wanted - exact) / np.linalg.norm(exact)
    assert 0 < error < (0.1 if "mxfp8" in name else 0.3)


# Rows of a shared weight are rows of one product; and stacks are products side by side.
def test_vmap():
    format = eqq.NVFP4()
    by = lambda a, b: microscaled(*(as_operand(v, format) for v in (a, b)), 0, x.dtype)
    rows, both = jax.vmap(by, (0, None)), jax.vmap(by)
    ways = {
        "rows": (jax.vmap(rows, (0, None)), x, w[0]),
        "stack": (both, x, w),
        "weights": (jax.vmap(by, (None, 0)), x[0], w),
        "rows of a stack": (jax.vmap(rows, (0, 0)), x, w),
    }
    everything = lambda: [fn(*map(jnp.asarray, ab)) for fn, *ab in ways.values()]
    found = dict(zip(ways, jax.jit(everything)(), strict=True))
    wide_by = lambda a: wide(as_operand(jnp.asarray(a), format))
    of_rows = np.stack([wide_by(row) for row in x.reshape(-1, 64)]).reshape(x.shape)
    wanted = {
        "rows": np.einsum("brk,nk->brn", of_rows, wide_by(w[0])),
        "stack": np.einsum("brk,bnk->brn", wide_by(x), wide_by(w)),
        "weights": np.einsum("rk,bnk->brn", wide_by(x[0]), wide_by(w)),
        "rows of a stack": np.einsum("brk,bnk->brn", of_rows, wide_by(w)),
    }
    for name, y in wanted.items():
        size = np.max(np.abs(y), -1, keepdims=True)
        assert np.all(np.abs(found[name] - y) <= 1e-5 * size), name


composite = re.compile(r'composite "xla.scaled_dot".*: \((.*)\) -> tensor<(.*)>')


def composites(fn, *args, platform="cuda"):
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return [match.groups() for match in composite.finditer(text)]


# What a program for such a device asks for; and no other program.
@pytest.mark.parametrize("name", formats)
def test_programs(name):
    format, element, scale = formats[name]
    group = 16 if "nv" in name else 32
    rows, w = np.asarray(normal(7, 64)), np.asarray(normal(40, 64, seed=1))

    def fn(rows, w):
        return jax.vmap(lambda x: low(w, format) @ x)(rows)

    def gradient(rows, w):
        return jax.grad(lambda x, w: jnp.sum(fn(x, w) ** 2), (0, 1))(rows, w)

    with compiled_for("NVIDIA GB200"):
        ((operands, result),) = composites(fn, rows, w)
        assert operands.split(", ") == [
            f"tensor<7x64x{element}>",
            f"tensor<40x64x{element}>",
            f"tensor<7x{64 // group}x{scale}>",
            f"tensor<40x{64 // group}x{scale}>",
        ]
        assert result == "7x40xf32"
        if name == "mxfp8":
            # Blocks lie along what the forward pass contracts: only that multiplies so.
            assert len(composites(gradient, rows, w)) == 1
            assert composites(fn, rows, w, platform="cpu") == []
            assert composites(fn, rows[:, :48], w[:, :48]) == []
    if name == "mxfp8":
        assert composites(fn, rows, w) == []
        for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"):
            with compiled_for(kind):
                assert composites(fn, rows, w) == []


# Each device of a mesh has such products of what it holds; what XLA splits has none.
def test_sharded(monkeypatch):
    monkeypatch.setattr(_microscaled, "blackwell", lambda: True)
    rows, w, m = normal(16, 64), normal(40, 64, seed=1), mesh("auto", 8)
    fn = lambda x, w: x @ low(w, eqq.MXFP8()).mT
    mapped = jax.shard_map(fn, mesh=m, in_specs=(P("a"), P()), out_specs=P("a"))
    args = put(rows, m, "a"), put(w, m)
    assert composites(fn, *args) == []
    ((operands, _),) = composites(mapped, *args)
    assert operands.startswith("tensor<2x64xf8E4M3FN>, tensor<40x64xf8E4M3FN>")
    np.testing.assert_allclose(
        jax.jit(mapped)(*args), fn(rows, w), rtol=1e-5, atol=1e-5
    )


# For one platform the operation is exported with its meaning; and for several, of which
# this one has the same numbers, the meaning alone.
def test_export():
    rows, w = normal(8, 64), normal(40, 64, seed=1)
    fn = jax.jit(lambda x: jax.vmap(lambda x: low(w, eqq.NVFP4()) @ x)(x))
    export = lambda *platforms: jax.export.export(fn, platforms=platforms)(rows)
    with compiled_for("NVIDIA B200"):
        alone, several = export("cuda"), export("cpu", "cuda")
        assert "xla.scaled_dot" in alone.mlir_module()
        assert jax.export.deserialize(alone.serialize()).platforms == ("cuda",)
        assert "xla.scaled_dot" not in several.mlir_module()
    read = jax.export.deserialize(several.serialize())
    np.testing.assert_allclose(read.call(rows), fn(rows), rtol=1e-6, atol=1e-6)
