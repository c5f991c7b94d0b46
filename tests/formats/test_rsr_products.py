import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq

from ..helpers import error, normal, trees_equal
from .rsr import draw, every_format, every_kind, exact, integers, some_formats


kernels = pytest.mark.parametrize("kernel", ["reference", None])


@jax.jit
def both_products(x, z, q):
    return x @ q, z @ q.T


@pytest.mark.examples(2)
@every_format
def test_exact_for_integers(format):
    w = draw(format, 37, 50)
    q = eqq.quantize(w, format)
    x, z = integers(2, 37), integers(2, 50, dtype=np.int32)
    y, transposed = both_products(x, z, q)
    np.testing.assert_array_equal(y, exact(x, w))
    assert transposed.dtype == jnp.float32
    np.testing.assert_array_equal(transposed, exact(z, w.T))


@pytest.mark.examples(3)
@kernels
@some_formats
@pytest.mark.parametrize("shape", [(1, 1), (83, 5), (50, 600)])
def test_exact_for_integers_of_any_size(format, shape, kernel):
    w = draw(format, *shape)
    q = eqq.quantize(w, format)
    for m in (0, 1, 3):
        x, z = integers(m, shape[0]), integers(m, shape[1])
        y = eqq.qmatmul(x, q, kernel=kernel)
        np.testing.assert_array_equal(y, exact(x, w))
        y = eqq.qmatmul(z, q.T, kernel=kernel)
        np.testing.assert_array_equal(y, exact(z, w.T))


# All sums stay below 2**24, up to which float32 has every integer.
@pytest.mark.examples(4)
@kernels
@some_formats
@pytest.mark.parametrize("m", [1, 5])
def test_exact_for_large_integers(format, m, kernel):
    rng = np.random.default_rng(0)
    w = draw(format, 96, 50)
    q = eqq.quantize(w, format)
    for k, w, q in ((96, w, q), (50, w.T, q.T)):
        one, two, many = np.zeros((3, m, k))
        one[:, 7] = 2**24 - rng.integers(1, 4, m)
        two[:, [0, -1]] = 2**23 - rng.integers(1, 4, (m, 2))
        many[:] = np.floor(rng.random((m, k)) ** 4 * (2**23 / k))
        many[:, 3] = 2**23 - 5
        for x in (one, two, many):
            x = jnp.asarray(x * rng.choice([-1, 1], x.shape), np.float32)
            y = eqq.qmatmul(x, q, kernel=kernel)
            np.testing.assert_array_equal(y, np.asarray(x, int) @ np.asarray(w, int))


# Whole codes are looked up where there are fewer of them than rows, else their halves.
@pytest.mark.examples(2)
@kernels
@pytest.mark.parametrize("n", [3, 5000])
@pytest.mark.parametrize(
    "format", [eqq.RSRBinary(12), eqq.RSRTernary(7), eqq.RSRTernary(12)], ids=str
)
def test_many_codes(format, n, kernel):
    w = draw(format, 27, n)
    q = eqq.quantize(w, format)
    x, z = integers(1, 27), integers(1, n)
    np.testing.assert_array_equal(eqq.qmatmul(x, q, kernel=kernel), exact(x, w))
    np.testing.assert_array_equal(eqq.qmatmul(z, q.T, kernel=kernel), exact(z, w.T))


@pytest.mark.examples(3)
@kernels
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("axis", [-1, -2])
@some_formats
def test_product(format, axis, dtype, kernel):
    w = draw(format, 70, 45)
    q = eqq.quantize(w, format, axis=axis)
    x = normal(2, 70, dtype=dtype)
    y = eqq.qmatmul(x, q, kernel=kernel)
    assert y.dtype == dtype
    # Accumulated in float32, and rounded once.
    expected = exact(x, w)
    bound = exact(np.abs(np.asarray(x)), np.abs(np.asarray(w)))
    rounding = float(jnp.finfo(dtype).eps) / 2 * np.abs(expected)
    y = np.asarray(y, np.float64)
    assert np.all(np.abs(y - expected) <= 1.01 * rounding + 1e-5 * bound)


# In float32 a long sum of equal numbers drifts, all of it to the same side.
@pytest.mark.examples(1)
@every_kind
def test_long_sums(kind):
    w = jnp.ones((20000, 3))
    x = jnp.full((1, 20000), 0.1)
    for k in (1, 4, 11):
        q = eqq.quantize(w, kind(k))
        y = eqq.qmatmul(x, q, kernel="rsr_lookup")
        assert error(y, x, w) < 1e-5
        q = eqq.quantize(w, kind(k), axis=-1)
        y = eqq.qmatmul(x, q, kernel="rsr_segment_sum")
        assert error(y, x, w) < 1e-5


@some_formats
def test_not_finite_inputs(format):
    w = draw(format, 37, 40)
    x = normal(2, 37).at[1, 20].set(np.nan)
    for axis in (-1, -2):
        q = eqq.quantize(w, format, axis=axis)
        y = x @ q
        assert np.all(np.isfinite(y[0])) and np.all(np.isnan(y[1]))


@pytest.mark.examples(1)
@some_formats
def test_float64(format):
    with jax.enable_x64(True):
        w = draw(format, 70, 45, dtype=np.float64)
        x = normal(1, 70, dtype=np.float64)
        for axis in (-1, -2):
            y = x @ eqq.quantize(w, format, axis=axis)
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(y, x @ w, rtol=1e-12, atol=1e-12)


@pytest.mark.examples(1)
@some_formats
def test_vectors_and_stacks(format):
    w, x = np.asarray(draw(format, 3, 37, 20)), integers(37)
    q = eqq.quantize(w, format)
    z = integers(20)
    np.testing.assert_array_equal(x @ q, exact(x, w))
    np.testing.assert_array_equal(q.mT @ x, exact(x, w))
    np.testing.assert_array_equal(z @ q.mT, exact(z, w.swapaxes(1, 2)))
    x, z = integers(3, 2, 37), integers(3, 1, 20)
    np.testing.assert_array_equal(x @ q, exact(x, w))
    np.testing.assert_array_equal(z @ q.mT, exact(z, w.swapaxes(1, 2)))
    one = eqq.quantize(w[0, :, 0], format)
    np.testing.assert_array_equal(x @ one, exact(x, w[0, :, 0]))
    np.testing.assert_array_equal(x[0, 0] @ one, exact(x[0, 0], w[0, :, 0]))


@some_formats
def test_empty_stacks(format):
    q = eqq.quantize(np.zeros((0, 37, 20), np.int8), format)
    for m in (1, 2, 5):
        assert (jnp.ones((m, 37)) @ q).shape == (0, m, 20)
        assert (jnp.ones((m, 20)) @ q.mT).shape == (0, m, 37)


@pytest.mark.examples(1)
@some_formats
def test_transformations(format):
    w = draw(format, 3, 37, 20)
    q = jax.jit(lambda w: eqq.quantize(w, format))(w)
    assert trees_equal(q, eqq.quantize(w, format))
    assert trees_equal(q, jax.vmap(lambda w: eqq.quantize(w, format))(w))
    x = integers(3, 37)
    mapped = jax.jit(jax.vmap(lambda x, q: x @ q))(x, q)
    np.testing.assert_array_equal(mapped, exact(x[:, None], w)[:, 0])
    np.testing.assert_array_equal(jax.vmap(lambda x: x @ q[0])(x), exact(x, w[0]))

    def step(x, q):
        return x, x @ q

    _, ys = jax.lax.scan(step, x, q)
    np.testing.assert_array_equal(ys, exact(x, w))


@jax.jit
def derivatives(x, dx, dy, q):
    _, tangent = jax.jvp(lambda x: x @ q, (x,), (dx,))
    _, pull = jax.vjp(lambda x: x @ q, x)
    return tangent, *pull(dy), jax.hessian(lambda x: jnp.sum((x @ q) ** 2))(x[0])


@pytest.mark.examples(1)
@some_formats
def test_derivatives(format):
    w = draw(format, 37, 20)
    x, dx, dy = integers(1, 37), integers(1, 37, seed=2), integers(1, 20, seed=3)
    for axis in (-1, -2):
        q = eqq.quantize(w, format, axis=axis)
        tangent, cotangent, hessian = derivatives(x, dx, dy, q)
        np.testing.assert_array_equal(tangent, exact(dx, w))
        np.testing.assert_array_equal(cotangent, exact(dy, w.T))
        np.testing.assert_array_equal(hessian, 2 * exact(w, w.T))
        grads = eqx.filter_grad(lambda q: jnp.sum(x @ q))(q)
        assert grads.stored["codes"] is None


@pytest.mark.examples(1)
@some_formats
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded(format, axis_type):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(axis_type,))
    w = draw(format, 24 * format.k, 16)
    for spec in (P("a", None), P(None, "a")):
        placed = jax.device_put(w, NamedSharding(mesh, spec))
        q = eqq.quantize(placed, format)
        assert q.placement is not None and q.placement.spec == spec
        np.testing.assert_array_equal(q.dequantize(), w)
        quantize = jax.shard_map(
            lambda w: eqq.quantize(w, format).dequantize(),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
        np.testing.assert_array_equal(jax.jit(quantize)(placed), w)
    # One row to a device.
    q = eqq.quantize(w, format)
    x = jax.device_put(integers(8, w.shape[0]), NamedSharding(mesh, P("a", None)))
    gradient = jax.shard_map(
        jax.grad(lambda x: jnp.sum((x @ q) ** 2)),
        mesh=mesh,
        in_specs=P("a", None),
        out_specs=P("a", None),
    )
    w, x, gradient = map(np.asarray, (w, x, jax.jit(gradient)(x)))
    np.testing.assert_array_equal(gradient, 2 * x @ w @ w.T)


def test_kernels_are_told_of(monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE", "0")
    q = eqq.quantize(draw(eqq.RSRBinary(), 37, 20), "rsrbinary")
    x, z = jnp.ones((2, 37)), jnp.ones((2, 20))
    assert eqq.explain(x, q).kernel == "rsr_lookup"
    assert eqq.explain(z, q.T).kernel in ("rsr_segment_sum", "rsr_tiles")
    explanation = eqq.explain(jnp.ones((128, 37)), q)
    assert explanation.kernel == "rsr_tiles"
    assert ("rsr_lookup", "is for 1 or 2 rows, got 128") in explanation.refused


# Neither makes anything of the size of the weight.
@pytest.mark.examples(2)
@pytest.mark.optimized
@some_formats
@pytest.mark.parametrize("m", [2, 32])
@pytest.mark.parametrize("axis", [-1, -2])
def test_memory(format, axis, m):
    w = jax.ShapeDtypeStruct((2048, 2048), np.int8)
    q = jax.eval_shape(lambda w: eqq.quantize(w, format, axis=axis), w)
    x = jax.ShapeDtypeStruct((m, 2048), np.float32)
    compiled = jax.jit(lambda x, q: x @ q).lower(x, q).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4e6
