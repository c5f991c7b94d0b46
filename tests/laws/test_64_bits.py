"""Where JAX makes arrays of 64 bits by default, results are as they are elsewhere."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import eqquant as eqq

from ..helpers import normal, trees_equal


def with_64_bits(fn):
    with jax.enable_x64(True):
        return fn()


key = jr.key(0)
matrices = {"w": normal(3, 32, 32)}
rows = normal(40, 32, seed=1)


def scanned(model, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, model["w"])[0]


@jax.jit
def reduced(x):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    fn = lambda x, e: eqq.train.quantized_pmean(x, "data", error=e, min_size=1)
    spec = P("data")
    return jax.shard_map(fn, mesh=mesh, in_specs=(spec, spec), out_specs=(P(), spec))(
        x, jnp.zeros_like(x)
    )


def rounded(x):
    def loss(w, x):
        w = eqq.train.tree_compute(w, backward=eqq.train.Stochastic("int8"))
        return jnp.sum(jnp.tanh(x @ w["w"]))

    return jax.grad(loss)({"w": matrices["w"][0]}, x)


programs = {
    "narrow scales": lambda: eqq.quantize(rows, eqq.Int4(16, scale_dtype=jnp.float16)),
    "trellises": lambda: eqq.quantize(rows, eqq.Trellis(2, states=8)),
    "random rounding": lambda: eqq.straight_through(rows, "int8", key=key),
    "clipping": lambda: jax.grad(
        lambda w: jnp.sum(eqq.straight_through(w, eqq.Ternary(), clip=True))
    )(rows),
    "statistics": lambda: eqq.calibrate(scanned, matrices, [rows]).as_tree(),
    "in sequence": lambda: eqq.tree_quantize(
        matrices, "int4", stats=eqq.Sequential(scanned, [rows])
    ),
    "rounded products": lambda: rounded(rows),
    "error feedback": lambda: reduced(rows),
}


@pytest.mark.examples(3)
@pytest.mark.parametrize("name", programs)
def test_the_same(name):
    found, wide = programs[name](), with_64_bits(programs[name])
    arrays = lambda tree: jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    kinds = lambda tree: [a.dtype for a in arrays(tree)]
    assert kinds(wide) == kinds(found)
    assert trees_equal(wide, found)


# (XLA takes minutes to compile a program of this format that begins in float64.)
def test_numbers_in_float64():
    format, w = eqq.formats.IQ4_XS(), np.asarray(normal(4, 256), np.float64)
    q = with_64_bits(lambda: eqq.quantize(w, format, axis=-1))
    assert q.dtype == jnp.float64
    low = eqq.quantize(jnp.asarray(w), format, axis=-1)
    assert trees_equal(q.stored, low.stored)


# (Optax computes the learning rate in float64.)
def test_tuned_scales():
    dense = {"w": matrices["w"][0]}
    fn = lambda model, x: jnp.tanh(x @ model["w"])
    tune = lambda: eqq.train.tune(fn, dense, eqq.tree_quantize(dense), [rows], 2)
    found, wide = (made["w"].dequantize() for made in (tune(), with_64_bits(tune)))
    np.testing.assert_allclose(wide, found, rtol=1e-5)


# NumPy's float64 equals None, the default.
def test_dtype_after_the_default():
    q = eqq.quantize(rows, "int8", axis=-1)
    filters = eqq.quantize(normal(8, 3, 5), "int8", axis=(1, 2))
    x, signal = normal(4, 32), normal(2, 3, 9)
    numbers = (((1,), (1,)), ((), ()))
    products = (
        lambda **given: eqq.qeinsum("mk,nk->nm", x, q, **given),
        lambda **given: eqq.qdot_general(x, q, numbers, **given),
        lambda **given: eqq.qconv(signal, filters, (1,), "SAME", **given),
    )
    for product in products:
        wide = dict(preferred_element_type=np.dtype("float64"))
        first, second = with_64_bits(lambda: (product(), product(**wide)))
        assert (first.dtype, second.dtype) == (np.float32, np.float64)
