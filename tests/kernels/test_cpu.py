import dataclasses
import itertools as it

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import per_byte
from eqquant.kernels.cpu._codes import codes_of

from ..helpers import error, formats, main_formats, native_formats, normal
from .every import every_product, kernels


def inputs(m, k, dtype=jnp.float32, seed=1):
    return normal(m, k, seed=seed, dtype=dtype)


def dense(x):
    return np.asarray(x.dequantize() if eqq.is_quantized(x) else x, np.float64)


def rounding(dtype):
    return float(jnp.finfo(dtype).eps)


def check(q, w, m, dtype):
    """The error of each kernel is the one that it declares. Returns their names."""
    x = inputs(m, q.shape[0], dtype)
    found = every_product(x, q)
    every = kernels(x, q)
    for kernel in every:
        y = found[kernel.name]
        assert y.dtype == dtype
        bound = kernel.error + rounding(dtype)
        assert error(y, dense(x), w) < bound, kernel.name
    return [kernel.name for kernel in every]


# Sizes that no block and no byte divides: blocks are left over, and bytes.
@pytest.mark.examples(2)
@native_formats
@pytest.mark.parametrize(
    "size, m, transposed, dtype",
    [((515, 33), 1, False, jnp.float32), ((66, 300), 9, True, jnp.bfloat16)],
)
def test_errors_are_as_declared(format, size, m, transposed, dtype):
    q = eqq.quantize(normal(*size), format)
    w = dense(q)
    check(*((q.T, w.T) if transposed else (q, w)), m, dtype)


@pytest.mark.examples(2)
@main_formats
@pytest.mark.parametrize(
    "size, m, dtype", [((1, 1), 3, jnp.float32), ((3, 2), 2, jnp.float16)]
)
def test_smallest_sizes(format, size, m, dtype):
    q = eqq.quantize(normal(*size), format)
    check(q.T, dense(q).T, m, dtype)


# Weights of which there are several tiles, and parts of a sweep.
@pytest.mark.examples(1)
@main_formats
@pytest.mark.parametrize("m, dtype", ((1, jnp.float32), (33, jnp.bfloat16)))
def test_large_weights(format, m, dtype):
    q = eqq.quantize(normal(1090, 800), format)
    w = dense(q)
    for names in (check(q, w, m, dtype), check(q.T, w.T, m, dtype)):
        # (Nested has no others for many rows before JAX 0.11.)
        assert names[0] != "reference" or isinstance(format, eqq.Nested)


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("int8", "ternary", "binary"))
@pytest.mark.parametrize("m", (1, 2, 5))
def test_rounded_activations(name, m):
    q = eqq.quantize(normal(130, 70), name, activation="int8")
    x = inputs(m, 130)
    rounded = eqq.quantize(x, "int8", axis=-1).dequantize()
    found = every_product(x, q)
    for kernel in kernels(x, q):
        y = found[kernel.name]
        assert error(y, rounded, q.dequantize()) < kernel.error, kernel.name


# The codes of others say nothing of a row: neither an outlier nor a number that is not
# finite.
@pytest.mark.examples(2)
@native_formats
def test_rows_are_apart(format):
    q = eqq.quantize(normal(130, 70), format)
    x = inputs(4, 130)
    for wild in (300.0, np.inf, np.nan):
        found, others = (every_product(x, q) for x in (x, x.at[1, 7].set(wild)))
        for name, y in found.items():
            z = others[name]
            rest = np.array([0, 2, 3])
            np.testing.assert_array_equal(y[rest], z[rest])
            assert np.all(np.isfinite(z[1])) == np.isfinite(wild)


# What is far larger than the rest has no digits, but does not hide those of the rest:
# be it in a few columns, anywhere in the rows, or too much for either.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("int8", "ternary", "binary"))
def test_outliers(name):
    w = normal(1024, 256).at[::128].set(0)
    columns = inputs(8, 1024).at[:, ::128].mul(1e6)
    own = np.array(inputs(8, 1024))
    for i, row in enumerate(own):
        row[i::100] *= 1e6
    q = eqq.quantize(w, name)
    many = inputs(8, 1024).at[2, ::11].mul(1e6)
    for x in (columns, own, jnp.where(jnp.arange(8)[:, None] == 2, many, own)):
        rounded = eqq.qmatmul(x, q, kernel="integer_tiles")
        assert error(rounded, x, q.dequantize()) < 1e-4


# Outliers in a few columns are multiplied on their own, whichever axis is contracted.
@pytest.mark.examples(1)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("name", ("int8", "ternary", "binary"))
def test_outliers_in_a_few_columns(name, transposed):
    q = eqq.quantize(normal(512, 512), name)
    q = q.T if transposed else q
    x = inputs(8, 512).at[:, 5].mul(1e4).at[3, 130].mul(1e5)
    y = eqq.qmatmul(x, q, kernel="integer_tiles")
    assert error(y, x, dense(q)) < 1e-4


# Bytes are digits to any base, also where a division by it takes more than a product
# and a shift.
@pytest.mark.parametrize("levels", (3, 7, 11, 14))
def test_codes_of_bytes(levels):
    p = per_byte(levels)
    bytes = np.arange(256, dtype=np.uint8)[:, None]
    wanted = bytes // levels ** np.arange(p) % levels
    found = codes_of(jnp.asarray(bytes), levels, p)
    np.testing.assert_array_equal(found, wanted.reshape(-1, 1))


# The outliers of one weight of a stack are its own.
def test_outliers_of_a_stack():
    q, x = eqq.quantize(normal(3, 512, 512), "int8"), normal(3, 8, 512, seed=1)
    x = x.at[1, :, 5].mul(1e6).at[2, 3].mul(jnp.where(normal(512) > 1, 1e6, 1.0))
    found = every_product(x, q)
    for kernel in kernels(x, q):
        bound = kernel.error if "bfloat16" in kernel.name else 1e-4
        for x_i, y_i, w_i in zip(x, found[kernel.name], q.dequantize()):
            assert error(y_i, x_i, w_i) < bound, kernel.name


@pytest.mark.examples(6)
@pytest.mark.parametrize("size", (1e-30, 1e-6, 1e6, 1e30))
@pytest.mark.parametrize("name", ("int8", "nf4", "int4"))
def test_sizes_of_inputs(name, size):
    q = eqq.quantize(normal(64, 48), name)
    for m in (1, 4):
        x = inputs(m, 64) * jnp.float32(size)
        assert error(x @ q, x, q.dequantize()) < 1e-4
        assert not np.any(jnp.zeros_like(x) @ q)


def product(x, q):
    return x @ q


@jax.jit
def transformed(x, q):
    loss = lambda x: jnp.sum(jnp.tanh(product(x, q)) ** 2)
    return {
        "jit": product(x, q),
        "vmap": jax.vmap(product)(x, q),
        "scan": jax.lax.scan(lambda c, xq: (c, product(*xq)), None, (x, q))[1],
        "grad": jax.grad(loss)(x),
        "jvp": jax.jvp(lambda x: product(x, q), (x,), (x,))[1],
    }


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ("nf4", "int8", "int4-affine", "ternary", "nested"))
@pytest.mark.parametrize("m", (1, 4))
def test_transformed(name, m):
    q = eqq.quantize(normal(3, 130, 70), formats[name])
    w = q.dequantize()
    x = jnp.stack([inputs(m, 130, seed=seed) for seed in range(3)])

    found, expected = transformed(x, q), transformed(x, w)
    jax.tree.map(
        lambda y, z: np.testing.assert_allclose(y, z, 1e-4, 1e-4), found, expected
    )


# What is compiled for one row has no copy of the weight.
@pytest.mark.optimized
@pytest.mark.parametrize("name", ("nf4", "int8", "int4", "ternary", "binary"))
def test_no_copy_of_the_weight(name):
    q = eqx.filter_eval_shape(
        lambda: eqq.quantize(jnp.zeros((1024, 2048)), formats[name])
    )
    x = jax.ShapeDtypeStruct((1, 1024), jnp.float32)
    text = jax.jit(lambda x, q: x @ q).lower(x, q).compile().as_text()
    for dtype in ("f32", "bf16", "s32", "s8"):
        results = [line.split(" = ")[-1] for line in text.splitlines() if " = " in line]
        sizes = (f"{dtype}[1024,2048]", f"{dtype}[2048,1024]")
        copies = [r for r in results if r.startswith(sizes)]
        # (What a loop is given is no copy.)
        given = ("parameter(", "get-tuple-element(")
        assert all(any(name in r for name in given) for r in copies), copies


# Before JAX 0.11, XLA would hold several copies of the scales of small blocks.
@pytest.mark.parametrize("name", ("nested", "nested-64", "mxfp4", "mxfp8", "nvfp4"))
def test_composite_scales(name, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE", "0")
    format = formats.get(name, eqq.Nested(eqq.NF4(64)))
    q = eqq.quantize(normal(512, 192), format).T
    few, many = (eqq.explain(normal(m, 192), q) for m in (1, 32))
    refused = name == "nested" and jax.__version_info__ < (0, 11)
    assert (many.kernel == "reference") == refused
    assert few.kernel != "reference"


# Codes of any number of bits, packed in any way.
packed = {
    "q3_k": eqq.formats.Q3_K(),
    "q5_1": eqq.formats.Q5_1(),
    "int-3-minimum": eqq.Int(3, 64, "minimum"),
    "int-4-ordered": eqq.Int(4, 128, "zero_point", ordered=True),
    "int-5-channel": eqq.Int(5, None),
    "fp8": eqq.FP8(),
}


@pytest.mark.examples(6)
@pytest.mark.parametrize("name", formats)
def test_not_the_reference(name):
    q = eqx.filter_eval_shape(lambda: eqq.quantize(jnp.zeros((300, 16)), formats[name]))
    for q, m in it.product((q, q.T), (1, 2, 3)):
        x = jax.ShapeDtypeStruct((m, q.shape[0]), jnp.float32)
        assert eqq.explain(x, q).kernel != "reference"


# Of sizes that divide into units, and of others: units are left over.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", packed)
@pytest.mark.parametrize("k, m", ((1536, 1), (1210, 2), (1210, 5)))
def test_units(name, k, m):
    q = eqq.quantize(normal(k, 40), packed[name])
    names = check(q, dense(q), m, jnp.float32)
    assert ("unit_sweep" in names) == (m <= 2) and "unit_tiles" in names
    check(q.T, dense(q).T, m, jnp.float32)


def test_permuted_blocks():
    q = eqq.quantize(normal(200, 24), eqq.Int(4, 32, "zero_point", ordered=True))
    block = np.random.default_rng(7).permutation(q.stored["block"].ravel())
    stored = q.stored | {"block": jnp.asarray(block).reshape(-1, 1)}
    q = eqx.tree_at(lambda q: q.stored, q, stored)
    for q, w in ((q, dense(q)), (q.T, dense(q).T)):
        for m in (2, 5):
            check(q, w, m, jnp.float32)


# Numbers that are nearly zero, next to a minimum that is not.
@pytest.mark.examples(1)
@pytest.mark.parametrize("bits", (3, 4, 8))
def test_minima(bits):
    w = np.full((512, 16), -1.0, np.float32)
    w[1::2] = np.asarray(normal(256, 16)) * 1e-3
    w[0::64] = 2.0
    q = eqq.quantize(jnp.asarray(w), eqq.Int(bits, 64, "minimum"))
    x = inputs(5, 512).at[:, 0::2].set(0)
    for m in (1, 5):
        for name, y in every_product(x[:m], q).items():
            assert error(y, x[:m], dense(q)) < 1e-5, name


@pytest.mark.examples(1)
@pytest.mark.optimized
@pytest.mark.parametrize("name", packed)
@pytest.mark.parametrize("m", (1, 16))
def test_memory_of_units(name, m):
    q = eqx.filter_eval_shape(
        lambda: eqq.quantize(jnp.zeros((4096, 1024)), packed[name])
    )
    for q in (q, q.T):
        forward = q.shape[0] == 4096
        kernel = "unit_sweep" if m == 1 and forward else "unit_tiles"
        x = jax.ShapeDtypeStruct((m, q.shape[0]), jnp.float32)
        fn = jax.jit(lambda x, q, kernel=kernel: eqq.qmatmul(x, q, kernel=kernel))
        memory = fn.lower(x, q).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 4 * 4096 * 1024 / 3


@pytest.mark.optimized
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA would copy pieces")
def test_columns_in_pieces():
    # (Beyond 32 MB, each call would map its temporaries anew.)
    k, n = 11008, 4096
    q = eqx.filter_eval_shape(
        lambda: eqq.quantize(jnp.zeros((k, n)), eqq.formats.Q2_K())
    )
    random = np.random.default_rng(0)
    stored = {
        name: random.integers(0, 64, a.shape, a.dtype) for name, a in q.stored.items()
    }
    q = dataclasses.replace(q, stored=jax.device_put(stored))
    fn = jax.jit(lambda x, q: eqq.qmatmul(x, q, kernel="unit_sweep"))
    x = inputs(1, k)
    memory = fn.lower(x, q).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 2**25
    y = np.asarray(fn(x, q))
    for start in (0, 1000, n - 64):
        some = np.asarray(q[:, start : start + 64], np.float64)
        assert error(y[:, start : start + 64], x, some) < 1e-5


# Of several tiles, and with a short one.
@pytest.mark.examples(1)
@pytest.mark.parametrize("bits", (2, 3))
def test_trellis(bits):
    format, rng = eqq.Trellis(bits, states=8), np.random.default_rng(0)
    # (Any words are codes.)
    q = eqq.quantize(normal(600, 1), format)
    words = rng.integers(0, 2**32, (608 * bits // 32, 900), dtype=np.uint32)
    stored = {"codes": words, "scale": jnp.broadcast_to(q.stored["scale"], (1, 900))}
    q = dataclasses.replace(q, stored=jax.tree.map(jnp.asarray, stored))
    for q, w in ((q, dense(q)), (q.T, dense(q).T)):
        assert "trellis_tiles" in check(q, w, 5, jnp.float32)
