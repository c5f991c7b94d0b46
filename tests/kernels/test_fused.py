import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
import eqquant.kernels._table as table

from ..helpers import all_formats, error, formats, normal
from ..laws.test_declared_bounds import hostile
from ..laws.test_not_finite import check, inputs, weight
from ..sharding.meshes import mesh, put, shard


# The product for any GPU is JAX alone, so that it runs on a CPU, too.


def problem_of(x, q, platform="cuda"):
    problem = eqq.explain(x, q).problem
    assert problem is not None
    return dataclasses.replace(problem, platform=platform)


def fused(x, q):
    """The kernel and the problem. The test is skipped if it does not do it."""
    if isinstance(q.format, eqq.Rotated):
        pytest.skip("its inputs are rotated outside of kernels")
    problem = problem_of(x, q)
    for kernel in table.supporting(problem):
        if kernel.name == "fused_sums":
            return kernel, problem
    pytest.skip(f"{q.format} is decoded")


def product(x, q):
    kernel, problem = fused(x, q)
    y = jax.jit(lambda x, stored: kernel.fn(x, stored, problem))(x, q.stored)
    assert y.dtype == x.dtype
    return y, kernel.bound(problem)


def every_layout(q):
    """Along blocks and across them, with each axis the last in memory."""
    rows = eqq.tree_prepack(q, platform="gpu")
    return q, rows, q.T, rows.T


@pytest.mark.examples(3)
@all_formats
def test_every_format(format):
    q = weight(format)
    for q in every_layout(q):
        x = inputs(q.shape[0], 2)
        y, bound = product(x, q)
        check(y, x, q.dequantize(), bound)


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ("nf4", "int4-affine"))
@pytest.mark.parametrize("m", (1, 8))
def test_hostile_inputs(name, m):
    q = eqq.quantize(normal(272, 40, seed=5), formats[name])
    for q in every_layout(q):
        x = jnp.asarray(hostile(q.shape[0], 8)[-m:])
        w = np.asarray(q.dequantize(), np.float64)
        y, bound = product(x, q)
        exact = np.asarray(x, np.float64)
        near = np.abs(exact) @ np.abs(w)
        tiny = 256 * len(w) * float(jnp.finfo(jnp.float32).tiny)
        assert np.all(np.abs(y - exact @ w) <= bound * near + tiny)


# More rows than the weight is decoded for at once.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name, m", (("binary", 7), ("int-3-minimum", 3), ("q2_k", 5)))
def test_groups_of_rows(name, m):
    q = eqq.quantize(normal(300, 40), formats[name])
    for q in every_layout(q):
        x = normal(m, q.shape[0], seed=1)
        y, bound = product(x, q)
        assert error(y, x, q.dequantize()) < bound


# Odd sizes, few columns, many, and parts of the sum.
@pytest.mark.examples(4)
@pytest.mark.parametrize(
    "k, n, format",
    (
        (1, 1, eqq.NF4(64)),
        (17, 3, eqq.Int(3, 64, "minimum")),
        (1, 77, eqq.Int(6, 16)),
        (5000, 2, eqq.NF4(64)),
        (640, 1029, eqq.Ternary(48)),
        (64, 70000, eqq.Int8()),
    ),
    ids=str,
)
def test_sizes(k, n, format):
    q = eqq.quantize(normal(k, n), format)
    for q in every_layout(q):
        x = normal(1, q.shape[0])
        y, bound = product(x, q)
        assert error(y, x, q.dequantize()) < bound


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_narrow_inputs(dtype):
    q = eqq.quantize(normal(112, 24), "nf4")
    x = normal(2, 112).astype(dtype)
    y, bound = product(x, q)
    assert error(y, x, q.dequantize()) < bound + float(jnp.finfo(dtype).eps)


def test_it_sums_in_float32():
    # (For inputs that are integers, all terms are exact.)
    q = eqq.quantize(jnp.ones((2**12, 8)), "int8")
    q = dataclasses.replace(
        q, stored=q.stored | {"scale": jnp.full_like(q.stored["scale"], 127 << 23)}
    )
    x = jnp.ones((1, 2**12), jnp.bfloat16).at[0, 0].set(256)
    for q in (q, eqq.tree_prepack(q, platform="gpu")):
        y, _ = product(x.astype(jnp.float32), q)
        np.testing.assert_array_equal(y, 127 * (2**12 + 255))


def test_activations():
    q = eqq.quantize(normal(96, 40), "int4", activation=eqq.Int8(32))
    x = normal(3, 96)
    y, bound = product(x, q)
    rounded = eqq.quantize(x, eqq.Int8(32), axis=-1).dequantize()
    assert error(y, rounded, q.dequantize()) < bound


@pytest.fixture
def here(monkeypatch):
    """Chosen on a CPU, too, before all others."""
    found = [
        (entry._replace(platforms=("cpu",), priority=99), kernel)
        for entry, kernel in table._table
        if kernel.name == "fused_sums"
    ]
    monkeypatch.setattr(table, "_table", [*table._table, *found])
    jax.clear_caches()
    yield
    monkeypatch.undo()
    jax.clear_caches()


def test_transforms(here):
    w = normal(3, 96, 40)
    q, x = eqq.quantize(w, "nf4"), normal(3, 4, 96)
    dense, exact = q.dequantize(), np.asarray(x, np.float64)
    assert eqq.explain(x[0], q[0]).kernel == "fused_sums"
    wanted = exact @ np.asarray(dense, np.float64)

    def near(y, wanted):
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-4)

    near(x @ q, wanted)
    near(jax.jit(jax.vmap(lambda x, q: x @ q))(x, q), wanted)
    near(jax.vmap(lambda x: x @ q[0])(x), exact @ np.asarray(dense[0], np.float64))
    near(jax.lax.scan(lambda _, xq: (None, xq[0] @ xq[1]), None, (x, q))[1], wanted)
    y, tangent = jax.jvp(lambda x: x @ q, (x,), (2 * x,))
    near(y, wanted)
    near(tangent, 2 * wanted)
    cotangent = jax.grad(lambda x: jnp.sum((x @ q) ** 2))(x)
    near(cotangent, 2 * wanted @ np.swapaxes(np.asarray(dense, np.float64), 1, 2))


@pytest.mark.parametrize("kind", ("auto", "explicit"))
def test_sharded(here, kind):
    some = mesh(kind, 2, 4)
    q = eqq.quantize(normal(512, 256), "int4")
    x, wanted = normal(4, 512), None
    wanted = np.asarray(x @ q)
    for spec in ((None, "b"), ("b", None)):
        with jax.set_mesh(some):
            split = shard(q, some, *spec)
            y = jax.jit(lambda x, q: x @ q)(put(x, some, "a"), split)
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-4)


def test_choice():
    x, q = normal(4, 256), eqq.quantize(normal(256, 64), "nf4")
    for platform in ("cuda", "rocm"):
        problem = problem_of(x, q, platform)
        for rows, highest in ((1, None), (8, None), (8, "highest")):
            few = dataclasses.replace(problem, rows=rows, precision=highest)
            assert table.choose(few).kernel.name == "fused_sums"
        many = dataclasses.replace(problem, rows=9)
        choice = table.choose(many)
        (reason,) = [
            why for kernel, why in choice.refused if kernel.name == "fused_sums"
        ]
        assert reason == "is for at most 8 rows, got 9"


# (Nothing compiles for these GPUs here.)
@pytest.mark.parametrize("m, products", ((1, 0), (64, 1)))
def test_lowered_for_amd(m, products):
    q = eqq.quantize(normal(512, 64), formats["q4_k"])
    for q in (q, eqq.tree_prepack(q, platform="rocm")):
        traced = jax.jit(lambda x, q: x @ q).trace(jnp.ones((m, 512)), q)
        text = traced.lower(lowering_platforms=("rocm",)).as_text()
        assert text.count("dot_general") == products
        assert "custom_call" not in text


# The formats that a product with a few rows decodes to memory first.
@all_formats
def test_what_is_decoded(format):
    q = weight(format)
    x = jnp.ones((1, q.shape[0]))
    problem = problem_of(x, q)
    names = [kernel.name for kernel in table.supporting(problem)]
    inner = format.format if isinstance(format, eqq.Rotated) else format
    # (The scales of bitsandbytes go on from one row to the next.)
    decoded = isinstance(inner, eqq.Trellis) or inner == formats["bnb-double"]
    assert ("fused_sums" in names) != decoded
