import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqquant as eqq
from eqquant.train import Stochastic, tree_compute, tree_preround

from ..helpers import normal
from ..sharding.meshes import mesh, put


x, w, ct = normal(16, 64), normal(32, 64, seed=1), normal(16, 32, seed=2)
integers = dict(forward="int8", backward=Stochastic("int8"))
floats = dict(forward=eqq.FP8(), backward=(eqq.FP8("e5m2"), None))


def step(x, w, ct, before=lambda m: m, **kwargs):
    def layer(x, w):
        model = tree_compute({"w": w}, axis=-1, min_size=0, **kwargs)
        return x @ before(model)["w"].mT

    y, pullback = jax.vjp(layer, x, w)
    return y, *pullback(ct)


# Data over "a"; the weight over its outputs or inputs, over both, or over the same
# devices as the data.
specs = [P("b", None), P(None, "b"), P("a", "b")]


# The same numbers as on one device: also the random ones.
@pytest.mark.examples(1)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    "kwargs",
    [integers, pytest.param(floats, marks=pytest.mark.thorough)],
    ids=["int8", "fp8"],
)
def test_sharded(kind, kwargs):
    wanted = jax.jit(lambda *args: step(*args, **kwargs))(x, w, ct)
    m = mesh(kind, 4, 2)
    for spec in specs if kind == "auto" else specs[:1]:
        with jax.set_mesh(m):
            of_y = P("a", spec[0] if spec[0] == "b" else None)
            args = put(x, m, "a"), put(w, m, *spec), put(ct, m, *of_y)
            before = tree_preround if spec == specs[0] else lambda m: m
            fn = jax.jit(lambda *args: step(*args, before, **kwargs))
            found = fn(*args)
            if kind == "explicit":
                assert jax.typeof(found[2]).sharding.spec == spec
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# Under `shard_map`, each device rounds what it has; and JAX sums the gradients.
def test_manual():
    m = mesh("auto", 8)
    each = lambda *args: step(*args, **integers)
    fn = jax.jit(
        jax.shard_map(
            each,
            mesh=m,
            in_specs=(P("a"), P(), P("a")),
            out_specs=(P("a"), P("a"), P()),
        )
    )
    y, dx, dw = fn(put(x, m, "a"), put(w, m), put(ct, m, "a"))
    rows = each(x[:2], w, ct[:2])
    np.testing.assert_allclose(y[:2], rows[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx[:2], rows[1], rtol=1e-5, atol=1e-5)
    sums = sum(
        np.asarray(each(x[i : i + 2], w, ct[i : i + 2])[2]) for i in range(0, 16, 2)
    )
    np.testing.assert_allclose(dw, sums, rtol=1e-4, atol=1e-4)
    assert jnp.linalg.norm(dw - ct.T @ x) < 0.05 * jnp.linalg.norm(ct.T @ x)


# Where `implicit` runs what `shard_map` maps, it finds the leaves inside.
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_manual_within_implicit(kind):
    m = mesh(kind, 8)
    each = lambda model, x: jnp.einsum("nk,bk->bn", model["w"], x)
    mapped = jax.shard_map(each, mesh=m, in_specs=(P(), P("a")), out_specs=P("a"))

    def run(fn, x, w):
        model = tree_compute({"w": w}, axis=-1, min_size=0, forward="int8")
        y, pullback = jax.vjp(lambda x: eqq.implicit(fn)(model, x), x)
        return y, *pullback(jnp.tanh(y))

    with jax.set_mesh(m):
        args = put(x, m, "a"), put(w, m)
        fn = jax.jit(lambda x, w: run(mapped, x, w))
        assert "xi8>" in fn.lower(*args).as_text()
        found = fn(*args)
    for a, b in zip(found, run(each, x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# The gradients of each of some models, on a mesh whose types carry the sharding.
def test_mapped():
    m = mesh("explicit", 4, 2)
    with jax.set_mesh(m):
        both = lambda a, *spec: put(jnp.stack([a, 2 * a]), m, None, *spec)
        args = both(x, "a"), both(w, "b"), both(ct, "a", "b")
        y, dx, dw = jax.jit(jax.vmap(lambda *args: step(*args, forward="int8")))(*args)
    for found, wanted in ((y, x @ w.T), (dx, ct @ w), (dw, ct.T @ x)):
        np.testing.assert_allclose(found[1], 4 * found[0], rtol=1e-4, atol=1e-4)
        assert jnp.linalg.norm(found[0] - wanted) < 0.02 * jnp.linalg.norm(wanted)
