import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqquant as eqq

from ..helpers import error, formats, normal
from .meshes import collectives, mesh, put, shard


k, n, m = 512, 256, 16


def product(x, q):
    return eqq.qmatmul(x, q, precision="highest")


cases = {
    "column": ((P(), P(None, "a")), P(None, "a"), product, {}),
    "row": (
        (P(None, "a"), P("a")),
        P(),
        lambda x, q: lax.psum(product(x, q), "a"),
        {"all-reduce": ["f32[16,256]"]},
    ),
    "data": ((P("a"), P()), P("a"), product, {}),
}


# Within `shard_map`, which checks what varies over the devices, a product is local.
@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ("nf4", "int8-32", "rotated"))
@pytest.mark.parametrize("case", cases)
def test_shard_map(case, name):
    in_specs, out_spec, fn, sent = cases[case]
    on = mesh("auto", 8)
    q, x = eqq.quantize(normal(k, n), formats[name]), normal(m, k)
    sharded = shard(q, on, *in_specs[1])
    fn = jax.shard_map(fn, mesh=on, in_specs=in_specs, out_specs=out_spec)
    assert collectives(fn, x, sharded) == sent
    assert error(jax.jit(fn)(x, sharded), x, q.dequantize()) < 1e-6

    def gradient(fn, q):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(fn(x, q) / 8))))(x)

    expected = gradient(product, q.dequantize())
    np.testing.assert_allclose(gradient(fn, sharded), expected, atol=1e-5)


# A shard cannot tell that its numbers were rotated together with those of others.
def test_a_split_through_a_rotated_block():
    on = mesh("auto", 8)
    product = lambda x, q: lax.psum(x @ q, "a")
    split = jax.shard_map(
        product, mesh=on, in_specs=(P(None, "a"), P("a")), out_specs=P()
    )
    x, q = normal(m, k), eqq.quantize(normal(k, n), eqq.Rotated(eqq.Int8(32), 128))
    with pytest.raises(ValueError, match="multiple of 128 numbers.*Got 64"):
        split(x, q)
    whole = eqq.quantize(normal(k, n), eqq.Rotated(eqq.Int8(32), 64))
    assert error(jax.jit(split)(x, whole), x, whole.dequantize()) < 1e-6


# Over some axes of the mesh only: the others are split as was declared.
@pytest.mark.parametrize("spec, sums", (((None, "b"), 0), (("b",), 1)))
def test_shard_map_over_some_axes(spec, sums):
    on = mesh("auto", 2, 4)
    q, x = eqq.quantize(normal(k, n)), put(normal(m, k), on, "a")
    sharded = shard(q, on, *spec)
    fn = jax.shard_map(
        product,
        mesh=on,
        in_specs=(P("a"), P()),
        out_specs=P("a"),
        axis_names={"a"},
    )
    assert collectives(fn, x, sharded) == (
        {"all-reduce": ["f32[8,256]"]} if sums else {}
    )
    assert error(jax.jit(fn)(x, sharded), normal(m, k), q.dequantize()) < 1e-6
