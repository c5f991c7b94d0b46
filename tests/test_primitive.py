import math

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, PartitionSpec as P

import eqquant as eqq
import eqquant.kernels.native._library as library

from .helpers import error, formats, main_formats, normal


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for param in equation.params.values():
            if isinstance(param, ClosedJaxpr):
                yield from _equations(param.jaxpr)


def _products(fn, *args):
    """The shapes, with all rows as one axis, of what is multiplied in a function."""
    found = []
    for equation in _equations(jax.make_jaxpr(fn)(*args).jaxpr):
        if equation.primitive.name == "qmatmul":
            x, stored, *_ = [var.aval.shape for var in equation.invars]
            *stack, _, _ = stored
            rows = x[len(stack) : -1]
            assert x[: len(stack)] == tuple(stack)
            found.append((*stack, math.prod(rows), x[-1]))
    return found


def _structs(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def _quantized_struct(shape, format, axis):
    def make(w):
        return eqq.quantize(w, format, axis=axis)

    return jax.eval_shape(make, jax.ShapeDtypeStruct(shape, jnp.float32))


# Of a weight of 4096 x 11008, which is a real one, 180 MB in float32.
@pytest.mark.examples(2)
@pytest.mark.optimized
@pytest.mark.parametrize("rows, axis", ((1, -2), (128, -1)))
@main_formats
def test_temporaries(format, rows, axis):
    q = _quantized_struct((4096, 11008), format, axis)
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
    compiled = jax.jit(lambda x, q: x @ q).lower(x, q).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary <= 0.1 * 4 * 4096 * 11008


@pytest.mark.examples(4)
@pytest.mark.optimized
@pytest.mark.parametrize("dtype, axis", ((jnp.float32, -1), (jnp.bfloat16, -2)))
@main_formats
def test_temporaries_of_small_weights(format, dtype, axis):
    q = _quantized_struct((1024, 2048), format, axis)
    x = jax.ShapeDtypeStruct((128, 1024), dtype)
    compiled = jax.jit(lambda x, q: x @ q).lower(x, q).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 4e6


# Whether the layers are scanned or not, the backward pass keeps no weight but packed.
@pytest.mark.examples(1)
@pytest.mark.optimized
@pytest.mark.parametrize("scanned", (False, True))
def test_temporaries_of_a_backward_pass(scanned):
    def loss(x, layers):
        if scanned:
            x, _ = jax.lax.scan(lambda x, q: (jnp.tanh(x @ q), None), x, layers)
        else:
            for q in layers:
                x = jnp.tanh(x @ q)
        return jnp.sum(x**2)

    if scanned:
        layers = _quantized_struct((16, 512, 512), eqq.NF4(), -2)
    else:
        layers = [_quantized_struct((512, 512), eqq.NF4(), -2)] * 16
    x = jax.ShapeDtypeStruct((8, 512), jnp.float32)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(x, layers).compile()
    # One dense layer takes 1 MB, all sixteen 17 MB.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5e6


def test_rows_are_folded():
    q = eqq.quantize(normal(64, 48), axis=-2)
    x = normal(3, 5, 7, 64)
    assert _products(lambda x: x @ q, x) == [(105, 64)]
    assert _products(jax.vmap(jax.vmap(lambda x: x @ q)), x) == [(105, 64)]
    vectors = jax.vmap(jax.vmap(jax.vmap(lambda x: q.T @ x)))
    assert _products(vectors, x) == [(105, 64)]
    gradient = jax.vmap(jax.grad(lambda x: jnp.sum((x @ q) ** 2)))
    assert _products(gradient, x) == [(105, 64), (105, 48)]


@pytest.mark.parametrize("native", (False, True))
def test_one_product_per_batch_in_the_compiled_program(native, monkeypatch):
    if not native:
        monkeypatch.setenv("EQQUANT_NATIVE", "0")
    elif library.missing() is not None:
        pytest.skip("there is no native library here")
    q = eqq.quantize(normal(128, 48), axis=-2)
    fn = jax.jit(jax.vmap(lambda x: x @ q))
    text = fn.lower(normal(9, 128)).as_text()
    name = "custom_call @eqquant_" if native else "dot_general"
    # (XLA may multiply by the lower and by the upper codes of bytes.)
    assert 1 <= text.count(name) <= (1 if native else 2)
    assert "while" not in text and "tensor<9x" in text


def test_weights_that_are_mapped_are_stacked():
    q = eqq.quantize(normal(5, 64, 48))
    assert _products(jax.vmap(lambda q, x: x @ q), q, normal(5, 7, 64)) == [(5, 7, 64)]
    shared = jax.vmap(lambda q, x: x @ q, in_axes=(0, None))
    assert _products(shared, q, normal(7, 64)) == [(5, 7, 64)]
    # Rows that are mapped in turn are rows still.
    rows = jax.vmap(jax.vmap(lambda q, x: x @ q), in_axes=(None, 0))
    assert _products(rows, q, normal(3, 5, 64)) == [(5, 3, 64)]


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("nf4", "ternary-tensor", "nested"))
def test_export(name):
    q = eqq.quantize(normal(256, 192), formats[name])

    def gradient(x, q):
        return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ q) ** 2))(x)

    (rows,) = jax.export.symbolic_shape("m")
    x = jax.ShapeDtypeStruct((rows, 256), jnp.float32)

    def on_leaves(x, leaves):
        treedef = jax.tree.structure(q)
        return gradient(x, jax.tree.unflatten(treedef, leaves))

    exported = jax.export.export(jax.jit(on_leaves), platforms=("cpu", "tpu", "cuda"))
    data = exported(x, _structs(jax.tree.leaves(q))).serialize()
    loaded = jax.export.deserialize(data)
    assert set(loaded.platforms) == {"cpu", "tpu", "cuda"}
    x = normal(5, 256)
    y = loaded.call(x, jax.tree.leaves(q))
    assert jnp.allclose(y, gradient(x, q), rtol=1e-4, atol=1e-4)


@pytest.mark.examples(1)
@pytest.mark.parametrize("shape", ((256, 128), (640, 1024)))
@pytest.mark.parametrize("axis", (-1, -2))
def test_shard_map(axis, shape):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    q = eqq.quantize(normal(*shape), axis=axis)
    w = q.dequantize()
    x = normal(16, shape[0])

    def loss(x, q):
        sharded = jax.shard_map(
            lambda x, q: x @ q, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")
        )
        return jnp.sum(jnp.tanh(sharded(x, q)))

    expected = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)
    # (Where `tanh` bends, a rounded product matters.)
    with jax.default_matmul_precision("highest"):
        gradient = jax.jit(jax.grad(loss))(x, q)
    assert jnp.allclose(gradient, expected, rtol=1e-3, atol=1e-3)


# Then the cotangent of `x`, which all devices share, is a sum over them.
def test_shard_map_over_the_weight():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    q = eqq.quantize(normal(128, 256), "int8")
    w = q.dequantize()
    x = normal(16, 128)

    def loss(x, stored):
        def product(x, stored):
            return x @ eqx.tree_at(lambda q: q.stored, q, stored)

        sharded = jax.shard_map(
            product, mesh=mesh, in_specs=(P(), P(None, "d")), out_specs=P(None, "d")
        )
        return jnp.sum(jnp.tanh(sharded(x, stored)))

    expected = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)
    gradient = jax.jit(jax.grad(loss))(x, q.stored)
    assert jnp.allclose(gradient, expected, rtol=1e-3, atol=1e-3)


def test_reference_by_name():
    q = eqq.quantize(normal(64, 48))
    x = normal(7, 64)
    y = eqq.qmatmul(x, q, kernel="reference", precision="highest")
    assert error(y, x, q.dequantize()) < 1e-6
    with pytest.raises(ValueError, match="`kernel` should be one of .*'reference'."):
        eqq.qmatmul(x, q, kernel="nonsense")
    with pytest.raises(ValueError, match="`precision`"):
        eqq.qmatmul(x, q, precision="very")
    gradient = jax.grad(lambda x: jnp.sum(eqq.qmatmul(x, q, kernel="reference")))(x)
    assert jnp.allclose(gradient, jnp.ones((7, 48)) @ q.dequantize().T, atol=1e-4)


def test_qmatmul_of_either_side():
    w, x = normal(64, 48), normal(7, 64)
    q = eqq.quantize(w)
    assert np.array_equal(eqq.qmatmul(x, q), x @ q)
    assert np.array_equal(eqq.qmatmul(q.T, x.T), q.T @ x.T)
    assert np.array_equal(eqq.qmatmul(x, w), x @ w)
    both = eqq.qmatmul(eqq.quantize(x, axis=-1), q)
    assert jnp.allclose(both, eqq.quantize(x, axis=-1).dequantize() @ q, atol=1e-4)
    with pytest.raises(ValueError, match="`kernel`"):
        eqq.qmatmul(x, w, kernel="reference")


# The derivative of a product with rounded activations is that of the product without.
def test_activation():
    q = eqq.quantize(normal(64, 48), "int8", activation="int8")
    x = normal(7, 64)
    rounded = eqq.quantize(x, "int8", axis=-1).dequantize()
    assert error(x @ q, rounded, q.dequantize()) < 1e-6
    assert error(x @ q, x, q.dequantize()) > 1e-4
    y, dy = jax.jvp(lambda x: x @ q, (x,), (x,))
    assert error(y, rounded, q.dequantize()) < 1e-6
    assert error(dy, x, q.dequantize()) < 1e-6


def test_complex():
    q = eqq.quantize(normal(64, 48))
    x = jax.lax.complex(normal(7, 64), normal(7, 64, seed=1))
    y = x @ q
    assert y.dtype == jnp.complex64
    assert error(y.real, x.real, q.dequantize()) < 1e-6
    assert error(y.imag, x.imag, q.dequantize()) < 1e-6


def test_checkpoint_and_scan():
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(64, 64, key=key))(
        jr.split(jr.key(0), 4)
    )
    x = normal(7, 64)

    @eqx.filter_jit
    def loss(x, layers):
        arrays, static = eqx.partition(layers, eqx.is_array)

        @jax.checkpoint
        def step(x, arrays):
            return jnp.tanh(jax.vmap(eqx.combine(arrays, static))(x)), None

        x, _ = jax.lax.scan(step, x, arrays)
        return jnp.sum(x)

    for name in ("nf4", "int8-32", "nested"):
        format = formats[name]
        quantized = eqq.tree_quantize(layers, format)
        gradient = jax.grad(loss)(x, quantized)
        expected = jax.grad(loss)(x, eqq.tree_dequantize(quantized))
        assert jnp.allclose(gradient, expected, rtol=1e-4, atol=1e-5)
