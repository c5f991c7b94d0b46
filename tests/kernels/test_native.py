import threading
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
import eqquant.kernels.native._library as library
import eqquant.kernels.native._weight as native_weight

from ..helpers import error, formats, native_formats, normal
from .every import kernels as every_kernel
from .levels import available


pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason="there is no native library here"
)

every_level = pytest.mark.parametrize("level", available)


@pytest.fixture
def at_level(level, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", level)


def dense(q):
    return np.asarray(q.dequantize(), np.float64)


def kernels(x, q):
    """The native ones."""
    return [k for k in every_kernel(x, q) if k.name.startswith("native")]


def rsr(k, ternary):
    format = eqq.RSRTernary(k) if ternary else eqq.RSRBinary(k)
    return pytest.param(format, id=f"{format}")


# Tails of every kind: of vectors, panels, bytes, blocks, rows.
sizes = ((1, 1), (5, 3), (130, 67), (640, 530))


@pytest.mark.examples(2)
@every_level
@pytest.mark.parametrize(
    "format",
    [formats[name] for name in ("nf4", "int4", "int4-affine", "int8", "int8-32")]
    + [formats[name] for name in ("ternary", "ternary-2-bits", "ternary-tensor")]
    + [formats["binary"], formats["binary-128"], eqq.Ternary(80)],
    ids=str,
)
def test_products(format, at_level):
    weights = [eqq.quantize(normal(*size), format) for size in sizes]
    pairs = [
        (normal(m, q.shape[0], seed=1), q)
        for m in (1, 3, 34)
        for w in weights
        for q in (w, w.T)
    ]

    # Compiled anew: what is compiled keeps the level that it was for.
    @jax.jit
    def products(pairs):
        return [
            [eqq.qmatmul(x, q, kernel=kernel.name) for kernel in kernels(x, q)]
            for x, q in pairs
        ]

    for (x, q), found in zip(pairs, products(pairs)):
        for kernel, y in zip(kernels(x, q), found, strict=True):
            bound = min(kernel.error, 1e-6 if kernel.name == "native" else 1)
            assert error(y, np.asarray(x, np.float64), dense(q)) < bound, kernel.name


def _forced(x, q, name):
    return jax.jit(lambda x, q: eqq.qmatmul(x, q, kernel=name))(x, q)


class Evenly(eqq.AbstractGrid):
    """A grid of someone's own."""

    levels: int = eqx.field(static=True)
    first: int = eqx.field(static=True)
    step: int = eqx.field(static=True)
    block_size: None = None
    scale_dtype: ClassVar = np.dtype(np.float32)

    def fit(self, blocks, size):
        return jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / abs(self.first or 1)

    def to_codes(self, blocks, size, scale):
        codes = jnp.round((blocks / scale - self.first) / self.step)
        return jnp.clip(codes, 0, self.levels - 1).astype(jnp.uint8)

    def to_points(self, codes):
        return codes.astype(jnp.float32) * self.step + self.first


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "format",
    (Evenly(2, 0, 1), Evenly(2, -1, 2), Evenly(2, -3, 2), Evenly(3, 1, 1))
    + (Evenly(4, -3, 2), Evenly(16, -24, 3), Evenly(16, -5, 1), Evenly(200, -100, 1))
    + (Evenly(5, -2, 1), Evenly(8, -4, 1), Evenly(64, -32, 1), Evenly(64, -63, 2)),
    ids=str,
)
def test_grids_of_others(format):
    q = eqq.quantize(normal(600, 520), format)
    x = normal(20, 600, seed=1)
    chosen = eqq.explain(x, q)
    bounds = {kernel.name: kernel.error for kernel in kernels(x, q)}
    # Three codes of base 5 to a byte, and two of base 8, are of no whole bits.
    assert bool(bounds) == (format.levels not in (5, 8))
    for name, bound in (bounds | {chosen.kernel: chosen.error}).items():
        assert error(_forced(x, q, name), x, dense(q)) < bound, name


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "format", (rsr(8, False), rsr(3, False), rsr(5, True), rsr(2, True))
)
def test_rsr_is_exact(format):
    rng = np.random.default_rng(0)
    w = rng.integers(format.domain[0], 2, (300, 70)).astype(np.float32)
    q = eqq.quantize(jnp.asarray(w), format)
    for q, w in ((q, w), (q.T, w.T)):
        x = rng.integers(-1000, 1000, (5, w.shape[0])).astype(np.float32)
        assert np.array_equal(jnp.asarray(x) @ q, x @ w)
        assert np.array_equal(_forced(jnp.asarray(x), q, "native"), x @ w)


def test_every_instruction_set_decodes_alike():
    # Of one row each: what is left is the decoded weight.
    q = eqq.quantize(normal(96, 40), formats["nf4-bfloat16-scales"])
    found = eqq.qmatmul(jnp.eye(96), q, kernel="native")
    assert np.array_equal(found, q.dequantize())


@pytest.mark.examples(3)
@native_formats
def test_is_chosen(format):
    q = eqq.quantize(normal(128, 64), format)
    explained = eqq.explain(normal(1, 128), q)
    if explained.kernel is None or not explained.kernel.startswith("native"):
        # (On some machines, XLA's are predicted to be faster.)
        reasons = dict(explained.refused)
        assert "native" in explained.seconds or "library" not in reasons["native"]


def test_rounded_activations():
    q = eqq.quantize(normal(200, 70), eqq.Int8(), activation=eqq.Int8())
    for m in (1, 2, 7, 70):
        x = normal(m, 200, seed=m)
        wanted = eqq.qmatmul(x, q, kernel="reference")
        assert np.allclose(x @ q, wanted, rtol=1e-5, atol=1e-4)


# The fractions of them that a digit stands for would not be normal numbers.
def test_inputs_that_are_tiny():
    q = eqq.quantize(normal(512, 512), "int8")
    x = 1e-35 * normal(20, 512, seed=1)
    found = {kernel.name for kernel in every_kernel(x, q)}
    assert "integer_tiles" in found
    assert ("native_integers" in found) == ("avx512" in available)
    for kernel in every_kernel(x, q):
        assert error(_forced(x, q, kernel.name), x, dense(q)) < kernel.error


# Nearly all of the weight is zero, which is the largest code.
def test_zero_points_that_are_large():
    w = -15 * jnp.zeros((640, 70)).at[::64].set(1)
    q = eqq.quantize(w, eqq.Int4(64, symmetric=False))
    x = (1 + 0.3 * normal(20, 640)).at[:, ::64].multiply(1e-3)
    for x, q in ((x, q), (normal(3, 70), q.T)):
        for kernel in every_kernel(x, q):
            found = _forced(x, q, kernel.name)
            assert error(found, x, dense(q)) < kernel.error, kernel.name


def test_stacks_are_one_call():
    q = eqq.quantize(normal(3, 96, 50), "nf4", axis=-2)
    x = normal(3, 2, 96, seed=1)
    product = jax.jit(lambda x, q: x @ q)
    text = product.lower(x, q).as_text()
    assert text.count("custom_call @eqquant_product") == 1
    w = np.asarray(q.dequantize(), np.float64)
    assert np.allclose(product(x, q), np.asarray(x, np.float64) @ w, atol=1e-4)


def test_export_is_for_any_machine():
    q = eqq.quantize(normal(64, 48), "nf4")
    product = jax.jit(lambda x: x @ q)
    x = normal(1, 64)
    assert "eqquant_product" in product.lower(x).as_text()
    exported = jax.export.export(product)(x)
    assert "eqquant_" not in exported.mlir_module()
    assert np.allclose(exported.call(x), product(x), atol=1e-4)


def test_precision_highest():
    q = eqq.quantize(normal(256, 64), "int8")
    x = normal(40, 256)
    with jax.default_matmul_precision("highest"):
        assert eqq.explain(x, q).kernel in ("native", "native_decoded")
        y = jax.jit(lambda x, q: x @ q)(x, q)
    assert error(y, np.asarray(x, np.float64), dense(q)) < 1e-6


def test_same_bits_each_time_and_in_threads():
    weights = [eqq.quantize(normal(512, 700, seed=i), "nf4") for i in range(2)]
    x = normal(3, 512, seed=9)
    product = jax.jit(lambda x, q: x @ q)
    wanted = [np.asarray(product(x, q)) for q in weights]
    wrong = []

    def many(i):
        for _ in range(50):
            if not np.array_equal(product(x, weights[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=many, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_of_few_rows = dict(product="int8_few_rows")
# What the library calls the numbers of attributes.
_kinds = {"scale_type": "scale", "offset_type": "offset", "point_type": "points"}


# What does not fit is an error of the library, not a crash.
@pytest.mark.parametrize(
    "changed, message",
    (
        (dict(codes=jnp.zeros((0, 16), jnp.uint8)), "room for 64 codes"),
        (dict(codes=jnp.zeros((32, 16), jnp.int8)), "matrix of bytes"),
        (dict(scale=jnp.zeros((1, 15), jnp.uint32)), "scales for 1 blocks"),
        (dict(scale=jnp.zeros((2, 16), jnp.uint32)), "scales for 1 blocks"),
        (dict(scale=jnp.zeros((1, 16), jnp.uint16)), "scales are of another type"),
        (dict(scale_type=np.int32(3)), "scales are of another type"),
        (dict(scale_type=np.int32(4)), "1 factors of the scales"),
        (dict(scale_type=np.int32(6)), "unknown type of scales"),
        (dict(factor=jnp.zeros((1, 1), jnp.uint32)), "0 factors of the scales"),
        (dict(offset_type="zero_point"), "zero-points for each row"),
        (
            dict(offset_type="zero_point", offset=jnp.zeros((2, 16), jnp.uint8)),
            "zero-points for 1 blocks",
        ),
        (dict(offset_type="zero_point", base=np.int32(1)), "integers from 0 on"),
        (dict(offset_type="minimum"), "minima"),
        (dict(points=jnp.zeros((1, 255))), "256 points"),
        (dict(x=jnp.zeros((2, 63))), "64 columns"),
        (dict(x=jnp.zeros((2, 64), jnp.int8)), "inputs should be of float32"),
        (dict(x=jnp.zeros((2, 64), jnp.uint32)), "of float32 or int8"),
        (dict(packing=np.int32(99)), "unknown packing"),
        (
            dict(packing="IQ2_XS", codes=jnp.zeros((74, 16), jnp.uint8)),
            "codebook of 512 points",
        ),
        (dict(point_type="e4m3"), "should have 8 bits"),
        (dict(packing="3"), "bytes of whole codes"),
        (dict(packing="Q4_K", k=np.int64(1)), "room for 1 codes"),
        (dict(product=np.int32(99)), "no such kernel"),
        (dict(product="bfloat16_nibbles", packing="2"), "no such kernel|for nibbles"),
        (dict(product="int8"), "no such kernel|consecutive"),
        (_of_few_rows | dict(x=jnp.zeros((17, 64))), "no such kernel|at most 16 rows"),
        (_of_few_rows | dict(packing="trits"), "no such kernel|at most 16 rows"),
        (
            _of_few_rows
            | dict(packing="3", codes=jnp.zeros((24, 16), jnp.uint8))
            | dict(block=np.int64(16), scale=jnp.zeros((4, 16), jnp.uint32)),
            "no such kernel|at most 16 rows",
        ),
        (dict(block=np.int64(0)), "not be empty"),
        (dict(block=np.int64(24)), "multiple of 16 codes"),
        (dict(k=np.int64(65)), "room for 65 codes"),
        (dict(base=np.int32(2**30)), "base should have 8 bits"),
        (dict(in_panels=True), "panels should be whole"),
        (dict(set=np.int32(99)), "no such kernel .* of instruction set 99"),
    ),
)
def test_checks_what_it_is_given(changed, message):
    given = dict(
        x=jnp.zeros((2, 64)),
        unit_of_row=jnp.zeros((0, 0)),
        codes=jnp.zeros((32, 16), jnp.uint8),
        scale=jnp.zeros((1, 16), jnp.uint32),
        factor=jnp.zeros((0, 0), jnp.uint32),
        offset=jnp.zeros((0, 0), jnp.uint8),
        points=jnp.zeros((1, 256)),
        product="lookup_tables",
        packing="4",
        block=np.int64(64),
        scale_type="float32",
        offset_type="None",
        point_type="integers",
        base=np.int32(0),
        k=np.int64(64),
        in_panels=False,
        set=np.int32(library.number_of_set()),
        unit=np.float32(1),
    )
    given = given | changed
    names = ("x", "unit_of_row", "codes", "scale", "factor", "offset", "points")
    operands = [given.pop(name) for name in names]
    for name, value in given.items():
        if isinstance(value, str):
            kind = _kinds.get(name, name)
            given[name] = np.int32(library.number(f"{kind}.{value}"))
    result = jax.ShapeDtypeStruct((len(operands[0]), 16), jnp.float32)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(
            jax.ffi.ffi_call("eqquant_product", result)(*operands, **given)
        )


def test_blocks_that_are_longer_than_a_row():
    q = eqq.quantize(normal(70, 16), eqq.Int4(2**16))
    x = normal(64, 70, seed=1)
    for kernel in kernels(x, q):
        y = _forced(x, q, kernel.name)
        assert error(y, x, dense(q)) < kernel.error, kernel.name


def test_without_it(monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE", "0")
    x, q = normal(1, 64), eqq.quantize(normal(64, 48), "nf4")
    explained = eqq.explain(x, q)
    assert not (explained.kernel or "native").startswith("native")
    assert "`EQQUANT_NATIVE=0` turns off" in f"{explained}".replace("\n", " ")
    assert (
        native_weight.refuse_in_bytes(explained.problem)
        == dict(explained.refused)["native"]
    )
