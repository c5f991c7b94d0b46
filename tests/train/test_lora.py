import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqquant as eqq
from eqquant.train import LoRA, lora, lora_only, lora_spec, merge_lora, with_lora

from ..helpers import each_row, formats, normal, trees_equal


def mlp(format=None):
    model = eqx.nn.MLP(64, 10, 48, depth=2, key=jr.key(0))
    return model if format is None else eqq.tree_quantize(model, format, min_size=1)


def trained(model, spec, size=0.1):
    """What training might make of the adapters."""

    def move(i, x, trains):
        return x + size * normal(*x.shape, seed=i) if trains else x

    leaves, treedef = jtu.tree_flatten(model)
    numbers = treedef.unflatten(range(len(leaves)))
    return jtu.tree_map(move, numbers, model, spec)


def adapters(model):
    is_lora = lambda x: isinstance(x, LoRA)
    return [x for x in jtu.tree_leaves(model, is_leaf=is_lora) if is_lora(x)]


@pytest.mark.examples(1)
@pytest.mark.parametrize("format", (None, "nf4", "ternary"))
@pytest.mark.parametrize("dora", (False, True))
def test_starts_as_the_model(dora, format):
    model = mlp(format)
    new, spec = lora(model, 4, min_size=1, dora=dora, key=jr.key(1))
    x = normal(5, 64)
    y, expected = each_row(new, x), each_row(model, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert len(adapters(new)) == 3
    params, frozen = eqx.partition(new, spec)
    sizes = [(64, 48), (48, 48), (48, 10)]
    expected = sum(4 * (k + n) + n * dora for k, n in sizes)
    assert sum(x.size for x in jtu.tree_leaves(params)) == expected
    assert trees_equal([w.base for w in adapters(frozen)], [*_weights(model)])


def _weights(model):
    return [layer.weight for layer in model.layers]


@pytest.mark.parametrize("rank_stabilized", (False, True))
def test_scale(rank_stabilized):
    options = dict(min_size=1, rank_stabilized=rank_stabilized, key=jr.key(1))
    new, _ = lora(mlp(), 4, alpha=16, **options)
    assert {w.scale for w in adapters(new)} == {8.0 if rank_stabilized else 4.0}
    new, _ = lora(mlp(), 4, **options)
    assert {w.scale for w in adapters(new)} == {2.0 if rank_stabilized else 1.0}


def test_which_weights():
    model = {"mlp": mlp(), "embed": eqx.nn.Embedding(64, 64, key=jr.key(0))}
    chosen = lambda *args, **kwargs: [
        path for path in lora_only(lora(model, 2, *args, key=jr.key(1), **kwargs)[0])
    ]
    assert chosen() == ["mlp.layers.0.weight", "mlp.layers.1.weight"]
    assert len(chosen(min_size=1)) == 3
    assert chosen(embeddings=True)[0] == "embed.weight"
    rules = eqq.Rules([("*.0.weight", True), ("*", None)])
    assert chosen(rules) == ["mlp.layers.0.weight"]
    spec = jtu.tree_map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m["mlp"].layers[2].weight, spec, "int8")
    assert chosen(spec) == ["mlp.layers.2.weight"]


# Of a model that is quantized in part, or in another orientation.
def test_plain_functions():
    w = {"in": normal(64, 32), "out": eqq.quantize(normal(32, 48), "int8")}
    f = lambda w, x: jnp.tanh(x @ w["in"]) @ w["out"]
    new, spec = lora(w, 4, key=jr.key(0))
    assert (new["in"].axis, new["out"].axis) == (-2, -2)
    assert new["out"].a.shape == (4, 32) and new["out"].b.shape == (48, 4)
    new = trained(new, spec)
    x = normal(5, 64)
    y = f(new, x)
    np.testing.assert_allclose(y, f(merge_lora(new), x), rtol=1e-4, atol=1e-4)
    assert np.max(np.abs(y - f(w, x))) > 0.1


@pytest.mark.parametrize("dora", (False, True))
def test_embedding(dora):
    embedding = eqx.nn.Embedding(64, 32, key=jr.key(0))
    embedding = eqq.tree_quantize(embedding, "int8", embeddings=True)
    new, spec = lora(embedding, 4, embeddings=True, dora=dora, key=jr.key(1))
    new = trained(new, spec)
    rows = jax.vmap(new)(jnp.array([3, 5, 3]))
    expected = merge_lora(new).weight[jnp.array([3, 5, 3])]
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


# Layers that are scanned, and computed again in the backward pass, or one by one.
@pytest.mark.examples(1)
@pytest.mark.parametrize("dora", (False, True))
def test_stacked_layers(dora):
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(64, 64, key=key))
    layers = eqq.tree_quantize(make(jr.split(jr.key(0), 3)), "nf4")
    new, spec = lora(layers, 4, dora=dora, key=jr.key(1))
    new = trained(new, spec)
    assert new.weight.a.shape == (3, 4, 64) and new.weight.b.shape == (3, 64, 4)
    params, frozen = eqx.partition(new, spec)
    x = normal(5, 64)

    def scanned(params):
        arrays, static = eqx.partition(eqx.combine(params, frozen), eqx.is_array)

        @jax.checkpoint
        def step(x, arrays):
            return jnp.tanh(jax.vmap(eqx.combine(arrays, static))(x)), None

        y, _ = jax.lax.scan(step, x, arrays)
        return jnp.sum(y**2)

    def unrolled(params):
        arrays, static = eqx.partition(eqx.combine(params, frozen), eqx.is_array)
        y = x
        for i in range(3):
            layer = eqx.combine(jtu.tree_map(lambda a: a[i], arrays), static)
            y = jnp.tanh(jax.vmap(layer)(y))
        return jnp.sum(y**2)

    gradients, expected = (
        jtu.tree_leaves(eqx.filter_jit(eqx.filter_grad(f))(params))
        for f in (scanned, unrolled)
    )
    for found, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.examples(1)
@pytest.mark.parametrize("format", (None, "nf4"))
@pytest.mark.parametrize("dora", (False, True))
def test_merge(dora, format):
    new, spec = lora(mlp(format), 4, min_size=1, dora=dora, key=jr.key(1))
    new = trained(new, spec)
    merged = merge_lora(new)
    assert jtu.tree_structure(merged) == jtu.tree_structure(mlp())
    x = normal(5, 64)
    np.testing.assert_allclose(
        each_row(new, x), each_row(merged, x), rtol=1e-4, atol=1e-4
    )
    again = merge_lora(new, "int8")
    expected = eqq.tree_quantize(merged, "int8", min_size=1)
    assert trees_equal(again, expected)


@pytest.mark.parametrize("dora", (False, True))
def test_files(tmp_path, dora):
    model = mlp("nf4")
    new, spec = lora(model, 4, alpha=3, min_size=1, dora=dora, key=jr.key(1))
    new = trained(new, spec)
    path = tmp_path / "adapters.safetensors"
    eqq.save(path, lora_only(new))
    loaded, loaded_spec = with_lora(model, eqq.load(path))
    assert trees_equal(loaded, new)
    assert trees_equal(loaded_spec, spec)
    # The file has the adapters, and nothing of the model.
    params = eqx.filter(new, spec)
    nbytes = sum(x.nbytes for x in jtu.tree_leaves(params))
    assert path.stat().st_size < nbytes + 4096
    # The model with its adapters is a tree as any other.
    eqq.save(path, new)
    assert trees_equal(eqq.load(path, like=new), new)


def test_mistakes_of_files():
    new, _ = lora(mlp(), 4, min_size=1, key=jr.key(1))
    found = lora_only(new)
    with pytest.raises(ValueError, match="no array at 'layers.0.weight'"):
        with_lora({"other": mlp()}, found)
    other = eqx.nn.MLP(64, 11, 48, depth=2, key=jr.key(0))
    with pytest.raises(ValueError, match=r"'layers.2.weight'.*\(11, 48\)"):
        with_lora(other, found)
    with pytest.raises(ValueError, match="'activation', which is not an array"):
        with_lora(mlp(), {"activation": found["layers.0.weight"]})
    with pytest.raises(ValueError, match="should have no adapters"):
        with_lora(new, found)
    for use in (lora_only, merge_lora):
        with pytest.raises(ValueError, match="has none"):
            use(mlp())


@pytest.mark.usefixtures("unchecked")
def test_mistakes():
    with pytest.raises(ValueError, match="`rank` should be 1 or more"):
        lora(mlp(), 0, key=jr.key(0))
    with pytest.raises(TypeError, match="`rank` should be an integer"):
        lora(mlp(), True, key=jr.key(0))
    with pytest.raises(TypeError, match="`alpha` should be a number. Got 'x'"):
        lora(mlp(), 4, key=jr.key(0), alpha="x")
    with pytest.raises(ValueError, match="should have no adapters"):
        lora(lora(mlp(), 4, key=jr.key(0))[0], 4, key=jr.key(0))
    with pytest.raises(ValueError, match="selects none"):
        lora(mlp(), 4, False, key=jr.key(0))
    with pytest.raises(ValueError, match="matches no array"):
        lora(mlp(), 4, eqq.Rules([("*.attention.*", True)]), key=jr.key(0))
    apart = {"w": eqq.quantize(normal(16, 8, 9, 9), axis=(-3, -1))}
    with pytest.raises(ValueError, match="`w`, of shape"):
        lora(apart, 4, {"w": True}, key=jr.key(0))


def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


# A whole loop: what is frozen stays to the bit, and has no state.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", (None, "nf4", "int4-affine", "nested"))
@pytest.mark.parametrize("dora", (False, True))
def test_training(dora, name):
    model = mlp(None if name is None else formats[name])
    new, spec = lora(model, 4, min_size=1, dora=dora, key=jr.key(1))
    params, frozen = eqx.partition(new, spec)
    x, y = normal(32, 64), normal(32, 10, seed=1)
    with jax.numpy_dtype_promotion("standard"):
        optimiser = optax.adamw(1e-2, weight_decay=0.1)
        state = optimiser.init(params)

        @eqx.filter_jit
        def step(params, state):
            f = lambda params: loss(eqx.combine(params, frozen), x, y)
            value, gradients = eqx.filter_value_and_grad(f)(params)
            updates, state = optimiser.update(gradients, state, params)
            return eqx.apply_updates(params, updates), state, value

        values = []
        for _ in range(20):
            params, state, value = step(params, state)
            values.append(value)
    assert values[-1] < 0.8 * values[0]
    moments = [x for x in jtu.tree_leaves(state) if x.ndim > 0]
    assert len(moments) == 2 * 3 * (3 if dora else 2)
    after = eqx.combine(params, frozen)
    assert trees_equal([w.base for w in adapters(after)], [*_weights(model)])
    assert trees_equal(lora_spec(after), spec)


# Even a loop that filters by `eqx.is_inexact_array`.
def test_training_filtered_by_inexact_arrays():
    model = mlp("nf4")
    new, _ = lora(model, 4, min_size=1, dora=True, key=jr.key(1))
    gradient = eqx.filter_jit(eqx.filter_grad(loss))
    gradients = gradient(new, normal(8, 64), normal(8, 10))
    after = eqx.apply_updates(new, gradients)
    pairs = list(zip(adapters(after), adapters(new), _weights(model), strict=True))
    for w, before, base in pairs:
        assert trees_equal(w.base, base) and trees_equal(w.norm, before.norm)
        assert not np.array_equal(w.b, before.b)


def test_a_struct_of_a_model():
    make = lambda: lora(mlp("nf4"), 4, min_size=1, dora=True, key=jr.key(1))
    model, _ = make()
    struct, spec = eqx.filter_eval_shape(make)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jtu.tree_leaves(tree)]
    arrays = eqx.filter(model, eqx.is_array)
    assert shapes(eqx.filter(struct, _is_struct)) == shapes(arrays)


def _is_struct(x):
    return isinstance(x, jax.ShapeDtypeStruct)


w = jnp.ones((8, 4))
trees = (
    {"a.b": w, "a": {"b": w}},
    {"a.b": {"c": w}, "a": {"b.c": w, "b": {"c": w}}, "d.e": w},
    {"a": [w, {"x": w}], "a.0": w, "a.1": {"x": w}, "a.1.x": w},
    {"['a']['b']": w, "a": {"b": w}, "a.b": w},
    {"a": {"0": w}, "a.0": w, "": {"": w}, ".": w},
)


# By whatever names: each weight gets back the adapters that it had.
@pytest.mark.parametrize("tree", trees)
@pytest.mark.parametrize("format", (None, "int8"))
def test_paths_that_look_alike(tmp_path, tree, format):
    if format is not None:
        quantized = lambda w: eqq.quantize(w, format)
        tree = jtu.tree_map(quantized, tree)
    new, spec = lora(tree, 2, min_size=1, key=jr.key(0))
    leaves, treedef = jtu.tree_flatten(eqx.filter(new, spec))
    numbered = [jnp.full_like(x, i) for i, x in enumerate(leaves)]
    new = eqx.combine(treedef.unflatten(numbered), new)
    found = lora_only(new)
    assert len(found) == len(adapters(new))
    eqq.save(tmp_path / "adapters.safetensors", found)
    for some in (found, eqq.load(tmp_path / "adapters.safetensors")):
        loaded, loaded_spec = with_lora(tree, some)
        assert trees_equal(loaded, new) and trees_equal(loaded_spec, spec)


# Files have these names, and one of a model whose keys have dots is read, if no other
# path looks like that.
def test_names_of_paths():
    one = lora({"a.b": w, "c": [w]}, 2, min_size=1, key=jr.key(0))[0]
    assert set(lora_only(one)) == {"a.b", "c.0"}
    two = lora(trees[0], 2, min_size=1, key=jr.key(0))[0]
    assert set(lora_only(two)) == {"['a.b']", "['a']['b']"}
    with pytest.raises(ValueError, match="no array at 'a.b'"):
        with_lora(trees[0], {"a.b": lora_only(one)["a.b"]})
