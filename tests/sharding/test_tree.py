import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqquant as eqq

from ..helpers import normal, trees_equal
from .meshes import mesh, put


rules = eqq.Rules(
    [
        ("layers.0.weight", P("b", None)),
        ("layers.0.bias", P("b")),
        ("layers.1.weight", P(None, "b")),
        ("*", P()),
    ]
)


def _mlp():
    return eqx.nn.MLP(256, 64, 256, 1, key=jr.key(0))


def _quantized():
    return eqq.tree_quantize(_mlp(), "nf4")


variants = {
    "quantized": _quantized,
    "lora": lambda: eqq.train.lora(_quantized(), rank=4, key=jr.key(1))[0],
    "dora": lambda: eqq.train.lora(_quantized(), rank=4, dora=True, key=jr.key(1))[0],
    "fake": lambda: eqq.train.tree_fake_quantize(_mlp(), "nf4"),
    "step sizes": lambda: eqq.train.tree_fake_quantize(_mlp(), "nf4", step_sizes=True),
}


@eqx.filter_jit
def _loss(model, x):
    return eqx.filter_value_and_grad(
        lambda model: jnp.sum(jnp.tanh(jax.vmap(model)(x)))
    )(model)


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "kind, variant",
    [("auto", name) for name in variants]
    + [("explicit", "quantized"), ("explicit", "lora")],
)
def test_models(kind, variant):
    on, model, x = mesh(kind, 2, 4), variants[variant](), normal(16, 256)
    sharded = eqq.tree_shard(model, rules, on)
    first, second = (layer.weight for layer in sharded.layers)
    if variant == "quantized":
        assert first.sharding == NamedSharding(on, P("b", None))
        assert second.placement.is_equivalent_to(NamedSharding(on, P(None, "b")), 2)
    expected, gradient = _loss(model, x)
    with jax.set_mesh(on):
        found, sharded_gradient = _loss(sharded, put(x, on, "a"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    leaves = zip(*map(jax.tree.leaves, (sharded_gradient, gradient)), strict=True)
    for a, b in leaves:
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_prefix():
    on, model = mesh("auto", 8), {"a": _quantized(), "b": [normal(16), None, "text"]}
    specs = {"a": None, "b": [P("a"), None, None]}
    sharded = eqq.tree_shard(model, specs, on)
    assert sharded["a"].layers[0].weight is model["a"].layers[0].weight
    assert sharded["b"][0].sharding == NamedSharding(on, P("a"))
    assert sharded["b"][1:] == [None, "text"]
    q = model["a"].layers[0].weight
    tied = eqq.tree_shard([q, q], NamedSharding(on, P("a")))
    assert tied[0] is tied[1] and tied[0].is_sharded
    with jax.set_mesh(on):
        assert trees_equal(eqq.tree_shard([q, q], P("a")), tied)
    skeleton = eqq.tree_shard(jax.eval_shape(lambda: q), P("a"), on)
    assert skeleton.stored["codes"].sharding.spec == P(None, "a")
    placed = jax.jit(lambda q: eqq.tree_shard(q, P("a"), on))(q)
    assert placed.is_sharded


def test_bad_input(unchecked):
    on, model = mesh("auto", 8), _quantized()
    with pytest.raises(TypeError, match="`mesh` should be .* Got 'a'"):
        eqq.tree_shard(model, rules, "a")
    with pytest.raises(ValueError, match="needs a mesh.*pass `mesh`"):
        eqq.tree_shard(model, rules)
    with pytest.raises(ValueError, match=r"`layers.0.bias`.*at most 1"):
        eqq.tree_shard(model, P("a", None), on)
    with pytest.raises(ValueError, match=r"`layers.0.weight`.*P\('a', None\)"):
        eqq.tree_shard(model, P(None, "a"), on)
    with pytest.raises(TypeError, match="`specs`"):
        eqq.tree_shard(model, eqq.Rules([("*", "nf4")]), on)
    with pytest.raises(TypeError, match="`specs`"):
        eqq.tree_shard(model, "a", on)
