import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqquant as eqq
from eqquant import implicit

from ..helpers import formats, main_formats, native_formats, normal
from .same import assert_same


# Functions of a matrix with no rule of their own: they dequantize.
computes = {
    "lt": lambda w: w < 0.5,
    "integer_pow": lambda w: w**3,
    "square": lambda w: w**2,
    "div": lambda w: 1.0 / (w + 5.0),
    "sqrt": lambda w: jnp.sqrt(jnp.abs(w)),
    "add": lambda w: w + 1.0,
    "sub": lambda w: w - w.T.T,
    "max": lambda w: jnp.maximum(w, 0.25),
    "exp": jnp.exp,
    "log": lambda w: jnp.log(jnp.abs(w) + 1.0),
    "reduce_sum": lambda w: jnp.sum(w, axis=0),
    "reduce_max": lambda w: jnp.max(w, axis=1),
    "reduce": lambda w: lax.reduce(w, jnp.float32(0), lax.add, (1,)),
    "argmax": lambda w: jnp.argmax(w, axis=0),
    "sort": lambda w: jnp.sort(w, axis=0),
    "cumsum": lambda w: jnp.cumsum(w, axis=1),
    "mul": lambda w: w * w,
    "pad": lambda w: jnp.pad(w, 2),
    "select_n": lambda w: jnp.where(w > 0, w, 0.1 * w),
    "scatter": lambda w: w.at[3].set(0.0),
    "bitcast": lambda w: lax.bitcast_convert_type(w, jnp.int32),
    "integers": lambda w: w.astype(jnp.int32),
    "clamp": lambda w: jnp.clip(w, -0.5, 0.5),
}


def test_computes():
    fn = lambda w: {name: fn(w) for name, fn in computes.items()}
    result = assert_same(fn, eqq.quantize(normal(48, 80)))
    assert not any(map(eqq.is_quantized, result.values()))


eformer = ("lt", "integer_pow", "div", "sqrt", "add", "reduce", "mul", "max")
eformer += ("exp", "log")


def computed(w):
    return [computes[name](w) for name in eformer]


@pytest.mark.examples(2)
@main_formats
def test_computes_in_every_format(format):
    assert_same(computed, eqq.quantize(normal(48, 80), format))


# Those that leave the codes as they are, or read them.
packed = {
    "transpose": lambda w: w.T,
    "convert_element_type": lambda w: w.astype(jnp.bfloat16),
    "reshape": lambda w: w.reshape(6, 8, 80),
    "concatenate": lambda w: jnp.concatenate([w, w], axis=0),
    "broadcast_in_dim": lambda w: jnp.broadcast_to(w, (2, 48, 80)),
    "slice": lambda w: lax.slice_in_dim(w, 5, 30, 2, axis=0),
    "dynamic_slice": lambda w: lax.dynamic_slice_in_dim(w, 40, 20, axis=0),
    "squeeze": lambda w: jnp.squeeze(jnp.expand_dims(w, (0, 2)), 2),
    "stack": lambda w: jnp.stack([w, w, w], axis=1),
    "split": lambda w: jnp.split(w, 3),
    "unstack": lambda w: jnp.unstack(jnp.stack([w, w])),
    "neg": lambda w: -w,
    "mul": lambda w: w * 2.0,
    "copy": lambda w: jnp.array(w),
    "stop_gradient": lax.stop_gradient,
    "optimization_barrier": lax.optimization_barrier,
}


def packed_by_all(w):
    return {name: fn(w) for name, fn in packed.items()}


@pytest.mark.examples(1)
@native_formats
def test_packed_in_every_format(format):
    q = eqq.quantize(normal(48, 80), format, axis=-1)
    assert_same(packed_by_all, q, packed="result", tolerance=1e-6)


def products(x, w, images, filters):
    return {
        "dot_general": x @ w.T,
        "transposed": w @ x.T,
        "gather": w[jnp.asarray([1, 2, 2])],
        "row": w[3],
        "conv_general_dilated": lax.conv_general_dilated(
            images, filters, (1, 1), "SAME"
        ),
    }


@pytest.mark.examples(2)
@native_formats
def test_products_in_every_format(format):
    w = eqq.quantize(normal(48, 80), format, axis=-1)
    filters = eqq.quantize(normal(6, 4, 3, 3), format, axis=(1, 2, 3))
    x, images = normal(3, 80, seed=1), normal(2, 4, 6, 6, seed=2)
    assert_same(products, x, w, images, filters, packed=True, read=3)


def both_ways(x, z, w):
    return x @ w, z @ w.T


# A multiple by a constant has other scales.
@pytest.mark.examples(2)
@native_formats
def test_multiples_in_every_format(format):
    q = eqq.quantize(normal(48, 80), format)
    # (These are rounded: only by powers of two.)
    factors = (2.0, -0.25) if format == formats["nf4-bfloat16-scales"] else (2.0, -3.0)

    def fn(w):
        return [w * factor for factor in factors] + [w / factors[0], -w]

    scaled = assert_same(fn, q, packed="result", tolerance=1e-6)

    # Products know of negative scales.
    x, z = normal(3, 48, seed=1), normal(2, 80, seed=2)
    assert_same(both_ways, x, z, scaled[1], packed=True, read=2)


def test_multiples_that_scales_cannot_take():
    q = eqq.quantize(normal(48, 80))
    assert_same(lambda w: [w / 0.0, 0.0 * w, 1e-30 * w, 1e30 * w, 1.0 / w], q)
    half = eqq.quantize(normal(48, 80), eqq.NF4(scale_dtype=jnp.float16))
    assert_same(lambda w: 1e-4 * w, half)
    assert_same(lambda w: -w, half, packed="result")


def test_a_multiple_by_what_is_not_constant_has_a_derivative():
    q = eqq.quantize(normal(48, 80))
    x = normal(3, 48, seed=1)

    def loss(s, w):
        return jnp.sum(jnp.sin(x @ (w * s)))

    s = jnp.asarray(2.0)
    expected = jax.grad(loss)(s, q.dequantize())
    assert jnp.allclose(jax.grad(implicit(loss))(s, q), expected, rtol=1e-3)
