import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant.formats import as_format, known_formats

from ..helpers import error, normal


kinds = {"rsrbinary": eqq.RSRBinary, "rsrternary": eqq.RSRTernary}
every_kind = pytest.mark.parametrize("kind", kinds.values(), ids=kinds)
every_format = pytest.mark.parametrize(
    "format", [kind(k) for kind in kinds.values() for k in range(1, 13)], ids=str
)
some_formats = pytest.mark.parametrize(
    "format", [eqq.RSRBinary(), eqq.RSRTernary(), eqq.RSRTernary(9)], ids=str
)
kernels = pytest.mark.parametrize("kernel", ["reference", None])


def draw(format, *shape, seed=0, dtype=np.float32):
    """Numbers of the domain of a format. Some rows and columns are the same all over,
    so that codes repeat, and others never occur."""
    rng = np.random.default_rng(seed)
    w = rng.choice(np.asarray(format.domain), shape)
    if w.ndim > 1:
        w[..., :: w.shape[-1] // 2 + 1] = 0
        w[..., -1:, :] = 0
        w[..., : w.shape[-2] // 3, :] = 1
    return jnp.asarray(w, dtype)


def integers(*shape, seed=1, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).integers(-99, 100, shape), dtype)


#
# What is stored
#


# Each code is a number written in base two or three, the first digit the lowest. Those
# that are missing from the last code are zeros.
@every_format
def test_codes(format):
    k = 37
    w = np.asarray(draw(format, k, 7))
    q = eqq.quantize(w, format)
    base, low = len(format.domain), min(format.domain)
    number = -(-k // format.k)
    codes = np.zeros((number, 7), int)
    for i in range(number * format.k):
        digits = w[i].astype(int) - low if i < k else -low
        codes[i // format.k] += digits * base ** (i % format.k)
    assert list(q.stored) == ["codes"]
    np.testing.assert_array_equal(q.stored["codes"], codes)
    bits = next(b for b in (8, 16, 32) if base**format.k <= 2**b)
    assert q.stored["codes"].dtype == f"uint{bits}"
    assert format.bits == bits / format.k
    assert q.tail == number * format.k - k
    assert q.nbytes == number * 7 * bits // 8
    np.testing.assert_array_equal(q.dequantize(), w)


shapes = st.sampled_from(
    [((1,), -1), ((33, 7), -1), ((130, 5), -2), ((2, 29, 3), 1), ((6, 3, 20), (0, 2))]
)
dtypes = st.sampled_from(
    [np.float32, jnp.bfloat16, np.float16, np.int8, np.int32, np.int64, np.float64]
)


@every_kind
@settings(max_examples=12)
@given(array=shapes, dtype=dtypes, k=st.integers(1, 12), concrete=st.booleans())
def test_round_trip(kind, array, dtype, k, concrete):
    shape, axis = array
    w = np.asarray(draw(kind(k), *shape)).astype(dtype)
    if concrete:
        w = jnp.asarray(w)
    q = eqq.quantize(w, kind(k), axis=axis)
    again = eqq.quantize(q.dequantize(), kind(k), axis=axis)
    expected = jnp.asarray(w).dtype
    expected = expected if jnp.issubdtype(expected, jnp.floating) else jnp.float32
    assert (q.shape, q.dtype) == (shape, expected)
    assert (q.dequantize().shape, q.dequantize().dtype) == (shape, expected)
    np.testing.assert_array_equal(np.asarray(q.dequantize(), np.float32), w)
    assert eqx.tree_equal(q, again)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.uint32, np.int16])
@every_kind
def test_integers_and_booleans(kind, dtype):
    w = draw(eqq.RSRBinary(), 30, 7, dtype=dtype)
    q = eqq.quantize(w, kind())
    assert q.dtype == jnp.float32
    np.testing.assert_array_equal(q.dequantize(), np.asarray(w, np.float32))
    q = eqq.quantize(w, kind(dtype=jnp.bfloat16))
    assert q.dtype == q.dequantize().dtype == jnp.bfloat16
    assert (integers(2, 30, dtype=np.int32) @ q).dtype == jnp.bfloat16


@some_formats
def test_empty(format):
    for shape in ((0,), (0, 3), (3, 0)):
        for axis in range(-len(shape), 0):
            q = eqq.quantize(jnp.zeros(shape, np.int8), format, axis=axis)
            assert q.shape == q.dequantize().shape == shape
    assert jnp.all(jnp.ones((2, 0)) @ eqq.quantize(jnp.zeros((0, 3)), format) == 0)
    assert (jnp.ones((2, 3)) @ eqq.quantize(jnp.zeros((3, 0)), format)).shape == (2, 0)


#
# Products
#


@every_format
def test_exact_for_integers(format):
    w = draw(format, 37, 50)
    q = eqq.quantize(w, format)
    x, z = integers(2, 37), integers(2, 50, dtype=np.int32)
    np.testing.assert_array_equal(x @ q, x @ w)
    y = z @ q.T
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, z.astype(np.float32) @ w.T)


@kernels
@some_formats
@pytest.mark.parametrize("shape", [(1, 1), (83, 5), (50, 600)])
def test_exact_for_integers_of_any_size(format, shape, kernel):
    w = draw(format, *shape)
    q = eqq.quantize(w, format)
    for m in (0, 1, 3):
        x, z = integers(m, shape[0]), integers(m, shape[1])
        y = eqq.qmatmul(x, q, kernel=kernel)
        np.testing.assert_array_equal(y, x @ w)
        y = eqq.qmatmul(z, q.T, kernel=kernel)
        np.testing.assert_array_equal(y, z @ w.T)


# All sums stay below 2**24, up to which float32 has every integer.
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
@kernels
@pytest.mark.parametrize("n", [3, 5000])
@pytest.mark.parametrize(
    "format", [eqq.RSRBinary(12), eqq.RSRTernary(7), eqq.RSRTernary(12)], ids=str
)
def test_many_codes(format, n, kernel):
    w = draw(format, 27, n)
    q = eqq.quantize(w, format)
    x, z = integers(1, 27), integers(1, n)
    np.testing.assert_array_equal(eqq.qmatmul(x, q, kernel=kernel), x @ w)
    np.testing.assert_array_equal(eqq.qmatmul(z, q.T, kernel=kernel), z @ w.T)


@kernels
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("axis", [-1, -2])
@some_formats
def test_product(format, axis, dtype, kernel):
    w = draw(format, 70, 45)
    q = eqq.quantize(w, format, axis=axis)
    for m in (1, 2):
        x = normal(m, 70, dtype=dtype)
        y = eqq.qmatmul(x, q, kernel=kernel)
        assert y.dtype == dtype
        # Accumulated in float32, and rounded once.
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
        bound = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64))
        rounding = float(jnp.finfo(dtype).eps) / 2 * np.abs(exact)
        y = np.asarray(y, np.float64)
        assert np.all(np.abs(y - exact) <= 1.01 * rounding + 1e-5 * bound)


# In float32 a long sum of equal numbers drifts, all of it to the same side.
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
    for axis in (-1, -2):
        q = eqq.quantize(w, format, axis=axis)
        y = normal(2, 37).at[1, 20].set(np.nan) @ q
        assert jnp.all(jnp.isfinite(y[0])) and jnp.all(jnp.isnan(y[1]))


@some_formats
def test_float64(format):
    with jax.enable_x64(True):
        w = draw(format, 70, 45, dtype=np.float64)
        x = normal(1, 70, dtype=np.float64)
        for axis in (-1, -2):
            y = x @ eqq.quantize(w, format, axis=axis)
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(y, x @ w, rtol=1e-12, atol=1e-12)


@some_formats
def test_vectors_and_stacks(format):
    w, x = draw(format, 3, 37, 20), integers(37)
    q = eqq.quantize(w, format)
    np.testing.assert_array_equal(x @ q, x @ w)
    np.testing.assert_array_equal(q.mT @ x, w.mT @ x)
    np.testing.assert_array_equal(integers(20) @ q.mT, integers(20) @ w.mT)
    x = integers(3, 2, 37)
    np.testing.assert_array_equal(x @ q, x @ w)
    np.testing.assert_array_equal(integers(3, 1, 20) @ q.mT, integers(3, 1, 20) @ w.mT)
    one = eqq.quantize(w[0, :, 0], format)
    np.testing.assert_array_equal(integers(37) @ one, integers(37) @ w[0, :, 0])
    np.testing.assert_array_equal(x @ one, x @ w[0, :, 0])


#
# Everything else that an array does
#


@some_formats
def test_layout(format):
    w = draw(format, 4, 37, 20)
    q = eqq.quantize(w, format)
    assert eqx.tree_equal(q.mT.mT, q)
    assert eqx.tree_equal(q[1], eqq.quantize(w[1], format))
    assert eqx.tree_equal(q[1:3], eqq.quantize(w[1:3], format))
    np.testing.assert_array_equal(q.mT.dequantize(), w.mT)
    rows = eqq.quantize(w[0], format, axis=-1)
    np.testing.assert_array_equal(rows[5], w[0][5])
    ids = jnp.array([[3, 0], [36, 3]])
    np.testing.assert_array_equal(rows[ids], w[0][ids])
    np.testing.assert_array_equal(q[2][5], w[2][5])
    np.testing.assert_array_equal(q + 1.0, w + 1)
    assert q.astype(jnp.bfloat16).dequantize().dtype == jnp.bfloat16
    with pytest.raises(AttributeError, match="no scales in RSR"):
        q.scale


@some_formats
def test_transformations(format):
    w = draw(format, 3, 37, 20)
    q = jax.jit(lambda w: eqq.quantize(w, format))(w)
    assert eqx.tree_equal(q, eqq.quantize(w, format))
    assert eqx.tree_equal(q, jax.vmap(lambda w: eqq.quantize(w, format))(w))
    x = integers(3, 37)
    np.testing.assert_array_equal(jax.vmap(jnp.matmul)(x, w), _mapped(x, q))
    np.testing.assert_array_equal(x @ w[0], jax.vmap(lambda x: x @ q[0])(x))

    def step(x, q):
        return x, x @ q

    _, ys = jax.lax.scan(step, x, q)
    np.testing.assert_array_equal(ys, jnp.stack([x @ each for each in w]))


def _mapped(x, q):
    return jax.jit(jax.vmap(lambda x, q: x @ q))(x, q)


@some_formats
def test_derivatives(format):
    w = draw(format, 37, 20)
    x, dx, dy = integers(1, 37), integers(1, 37, seed=2), integers(1, 20, seed=3)
    for axis in (-1, -2):
        q = eqq.quantize(w, format, axis=axis)
        _, tangent = jax.jvp(lambda x: x @ q, (x,), (dx,))
        np.testing.assert_array_equal(tangent, dx @ w)
        _, pull = jax.vjp(lambda x: x @ q, x)
        np.testing.assert_array_equal(*pull(dy), dy @ w.T)
        hessian = jax.hessian(lambda x: jnp.sum((x @ q) ** 2))(x[0])
        np.testing.assert_array_equal(hessian, 2 * w @ w.T)
        grads = eqx.filter_grad(lambda q: jnp.sum(x @ q))(q)
        assert grads.stored["codes"] is None


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


@some_formats
def test_save_and_load(format, tmp_path):
    path = tmp_path / "q.safetensors"
    for axis in (-1, -2):
        q = eqq.quantize(draw(format, 37, 20, dtype=np.int8), format, axis=axis)
        tree = {"q": q, "v": eqq.quantize(draw(format, 30), format)}
        eqq.save(path, tree)
        assert eqx.tree_equal(eqq.load(path), tree)
        assert eqx.tree_equal(eqq.load(path, like=tree), tree)


def test_in_a_model():
    model = eqx.nn.MLP(40, 3, 64, 2, key=jr.key(0))
    where = lambda model: model.layers[1].weight
    signs = eqx.tree_at(where, model, jnp.sign(where(model)))
    rules = eqq.Rules([("layers.1.weight", "rsrternary")])
    quantized = eqq.tree_quantize(signs, rules)
    assert where(quantized).format == eqq.RSRTernary()
    x = normal(5, 40)
    assert jnp.allclose(jax.vmap(quantized)(x), jax.vmap(signs)(x), atol=1e-5)
    report = str(eqq.report(quantized, signs))
    assert "RSRTernary(k=5)" in report
    with pytest.raises(ValueError, match="`layers.1.weight`: `w` should have no num"):
        eqq.tree_quantize(model, rules)


def test_kernels_are_told_of():
    q = eqq.quantize(draw(eqq.RSRBinary(), 37, 20), "rsrbinary")
    x, z = jnp.ones((2, 37)), jnp.ones((2, 20))
    assert eqq.explain(x, q).kernel == "rsr_lookup"
    assert eqq.explain(z, q.T).kernel == "rsr_segment_sum"
    explanation = eqq.explain(jnp.ones((128, 37)), q)
    assert explanation.kernel == "rsr_tiles"
    assert explanation.refused == [("rsr_lookup", "is for 1 or 2 rows, got 128")]


# Neither makes anything of the size of the weight.
@pytest.mark.optimized
@some_formats
@pytest.mark.parametrize("m", [1, 2, 32])
@pytest.mark.parametrize("axis", [-1, -2])
def test_memory(format, axis, m):
    w = jax.ShapeDtypeStruct((2048, 2048), np.int8)
    q = jax.eval_shape(lambda w: eqq.quantize(w, format, axis=axis), w)
    x = jax.ShapeDtypeStruct((m, 2048), np.float32)
    compiled = jax.jit(lambda x, q: x @ q).lower(x, q).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4e6


#
# Names and mistakes
#


@every_kind
def test_names(kind):
    assert as_format(kind.__name__) == kind()
    assert known_formats()[kind.__name__.lower()] is kind
    assert not [name for name in known_formats() if name.startswith("abstract")]
    assert str(kind()) == f"{kind.__name__}(k={kind().k})"
    assert str(kind(3)) == f"{kind.__name__}(k=3)"
    assert str(kind(3, "float16")) == f"{kind.__name__}(k=3, dtype=float16)"
    assert kind(3).block_size is None
    assert kind(3) == kind(3, np.float32) and hash(kind(3)) == hash(kind(3))
    assert kind(3) != kind(4) and kind(3) != kind(3, jnp.bfloat16)


@every_kind
@pytest.mark.parametrize(
    "kwargs,kind_of_error,message",
    [
        ({"k": 0}, ValueError, "`k` should be from 1 to 12.* Got 0"),
        ({"k": 13}, ValueError, "`k` should be from 1 to 12.* Got 13"),
        ({"k": True}, TypeError, "`k` should be an integer.* Got True, of type bool"),
        ({"k": 8.0}, TypeError, "8.0"),
        ({"dtype": np.int8}, ValueError, "`dtype` should be a floating.* Got int8"),
        ({"dtype": "no"}, TypeError, "`dtype` should be a floating.* Got 'no'"),
    ],
)
def test_bad_formats(kind, kwargs, kind_of_error, message):
    with pytest.raises(kind_of_error, match=message):
        kind(**kwargs)


@pytest.mark.parametrize(
    "dtype,value",
    [
        (np.float32, 0.5),
        (np.float32, np.nan),
        (np.float32, -np.inf),
        (jnp.bfloat16, 0.5),
        (np.int8, 2),
        (np.uint8, 255),
        (np.int64, 2**32),
        (np.float64, 1 + 1e-12),
    ],
)
@every_kind
def test_other_numbers(kind, dtype, value):
    w = np.zeros((20, 7), dtype)
    w[3, 4] = value
    domain = "0 and 1" if kind is eqq.RSRBinary else "-1, 0 and 1"
    message = (
        rf"`w` should have no numbers but {domain}, for {kind.__name__}\(k=\d\). Of "
        f"its 140 numbers 1 are others, such as {w[3, 4]}. .*rounds"
    )
    with pytest.raises(ValueError, match=message):
        eqq.quantize(w, kind())
    narrow = jnp.asarray(w)
    if narrow[3, 4] in (0, 1):  # as the last two, in 32 bits
        return
    with pytest.raises(ValueError, match=message):
        eqq.quantize(narrow, kind())
    # Closed over, `w` is known when the function is traced.
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: x @ eqq.quantize(narrow, kind()))(jnp.ones((2, 20)))


@every_kind
def test_other_numbers_when_traced(kind):
    w = draw(kind(), 3, 20, 7)
    quantize = eqx.filter_jit(lambda w: eqq.quantize(w, kind()).dequantize())
    mapped = eqx.filter_jit(jax.vmap(lambda w: eqq.quantize(w, kind()).dequantize()))
    for fn in (quantize, mapped):
        np.testing.assert_array_equal(fn(w), w)
        for value in (0.5, np.nan, 2, -2):
            with pytest.raises(RuntimeError, match="`w` should have no numbers but"):
                jax.block_until_ready(fn(w.at[1, 3, 4].set(value)))


def test_minus_one_is_not_binary():
    with pytest.raises(ValueError, match="such as -1. "):
        eqq.quantize(jnp.full((4, 4), -1), "rsrbinary")


@every_kind
def test_bad_use(kind):
    with pytest.raises(TypeError, match="integers or booleans. Got dtype complex64"):
        eqq.quantize(jnp.zeros((4, 4), complex), kind())
    with pytest.raises(TypeError, match="a floating-point dtype. Got dtype int32"):
        eqq.quantize(jnp.zeros((4, 4), int), "int8")
    with pytest.raises(ValueError, match="`activation` should.* Got RSR.* 1 only"):
        eqq.quantize(normal(4, 4), "int8", activation=kind())
    with pytest.raises(ValueError, match="no scales in RSR"):
        kind().encode(jnp.zeros((4, 4)), jnp.ones((4, 1)))
    with pytest.raises(ValueError, match="scales that are not nested"):
        eqq.Nested(kind())
