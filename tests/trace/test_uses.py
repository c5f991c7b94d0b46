import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from eqquant._trace import uses


key = jr.key(0)


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def used(fn, *args):
    """The uses of the arrays of the first argument, by path."""
    array = jax.Array | jax.ShapeDtypeStruct
    arrays = eqx.filter(args[0], lambda x: isinstance(x, array))
    paths, _ = jtu.tree_flatten_with_path(arrays)
    names = [jtu.keystr(path, simple=True, separator=".") for path, _ in paths]
    return dict(zip(names, uses(fn, args)))


def test_multihead_attention():
    layer = eqx.filter_eval_shape(eqx.nn.MultiheadAttention, 4, 16, key=key)
    found = used(
        lambda m, x: jax.vmap(lambda x: m(x, x, x))(x), layer, struct(3, 9, 16)
    )
    (q,), (k,), (v,), (out,) = (
        found[f"{name}_proj.weight"].products
        for name in ("query", "key", "value", "output")
    )
    for product in (q, k, v, out):
        assert (product.contracted, product.rows, product.stacked) == ((1,), 27, ())
    assert q.input == k.input == v.input != out.input
    assert all(use.others == () for use in found.values())


def test_mlp():
    layer = eqx.filter_eval_shape(eqx.nn.MLP, 16, 4, 24, depth=1, key=key)
    fn = lambda m, x: jax.jit(jax.checkpoint(jax.vmap(m)))(x)
    found = used(fn, layer, struct(8, 16))
    (product,) = found["layers.0.weight"].products
    assert (product.contracted, product.rows) == ((1,), 8)
    assert found["layers.0.bias"].products == ()
    assert found["layers.0.bias"].others == ("add",)


def scanned(m, x):
    arrays, static = eqx.partition(m, eqx.is_array)

    def step(x, arrays):
        return x + jax.vmap(eqx.combine(arrays, static))(x), None

    return lax.scan(jax.checkpoint(step), x, arrays)[0]


def unrolled(m, x):
    for i in range(3):
        one = jtu.tree_map(lambda a: a[i] if eqx.is_array(a) else a, m)
        x = x + jax.vmap(one)(x)
    return x


def split(m, x):
    arrays, static = eqx.partition(m, eqx.is_array)
    leaves, treedef = jtu.tree_flatten(arrays)
    for parts in zip(*(jnp.split(a, 3) for a in leaves), strict=True):
        one = treedef.unflatten([a[0] for a in parts])
        x = x + jax.vmap(eqx.combine(one, static))(x)
    return x


def looped(m, x):
    arrays, static = eqx.partition(m, eqx.is_array)

    def step(i, x):
        one = jtu.tree_map(lambda a: a[i], arrays)
        return x + jax.vmap(eqx.combine(one, static))(x)

    return lax.fori_loop(0, 3, step, x)


def dynamic(m, x):
    arrays, static = eqx.partition(m, eqx.is_array)

    def step(carry):
        i, x = carry
        one = jtu.tree_map(lambda a: a[i], arrays)
        return i + 1, x + jax.vmap(eqx.combine(one, static))(x)

    go_on = lambda carry: carry[0] < 3
    return lax.while_loop(go_on, step, (jnp.asarray(0), x))[1]


def mapped(m, x):
    call = lambda m, x: jax.vmap(m)(x)
    return eqx.filter_vmap(call, in_axes=(eqx.if_array(0), None))(m, x)


def make_stack():
    make = lambda key: eqx.nn.Linear(16, 16, key=key)
    return eqx.filter_eval_shape(eqx.filter_vmap(make), jr.split(key, 3))


@pytest.mark.parametrize("fn", [scanned, unrolled, split, looped, dynamic])
def test_stacks(fn):
    use = used(fn, make_stack(), struct(8, 16))["weight"]
    assert len(use.products) == (3 if fn in (unrolled, split) else 1)
    for product in use.products:
        assert (product.contracted, product.rows) == ((2,), 8)
        assert product.stacked == (0,)
    assert use.others == ()


# All members see the same inputs.
def test_ensemble():
    (product,) = used(mapped, make_stack(), struct(8, 16))["weight"].products
    assert (product.contracted, product.rows, product.stacked) == ((2,), 8, ())


def test_experts():
    w = struct(4, 16, 6)
    (product,) = used(
        lambda w, x: jnp.einsum("etk,ekn->etn", x, w), w, struct(4, 5, 16)
    )[""].products
    assert (product.contracted, product.rows, product.stacked) == ((1,), 5, (0,))
    sizes = struct(4, dtype=jnp.int32)
    use = used(lambda w, x, n: lax.ragged_dot(x, w, n), w, struct(8, 16), sizes)[""]
    (product,) = use.products
    assert (product.contracted, product.rows, product.stacked) == ((1,), 8, (0,))
    chosen = lambda w, x, ids: jnp.einsum("tk,tkn->tn", x, w[ids])
    use = used(chosen, w, struct(5, 16), struct(5, dtype=jnp.int32))[""]
    assert [p.contracted for p in use.products] == [(1,)]
    assert (use.products[0].stacked, use.others) == ((0,), ())


def test_axes():
    heads = lambda w, x: jnp.einsum("thd,hdo->to", x.reshape(8, 4, 4), w)
    (product,) = used(heads, struct(4, 4, 6), struct(8, 16))[""].products
    assert product.contracted == (0, 1)
    split = lambda w, x: jnp.einsum("thd,hdo->to", x, w.reshape(4, 4, 6))
    (product,) = used(split, struct(16, 6), struct(8, 4, 4))[""].products
    assert product.contracted == (0,)
    fused = lambda w, x: [x @ a.T for a in jnp.split(w, 3)]
    use = used(fused, struct(12, 16), struct(8, 16))[""]
    assert [product.contracted for product in use.products] == [(1,)] * 3
    joined = lambda ws, x: x @ jnp.concatenate(ws).T
    found = used(joined, [struct(4, 16), struct(8, 16)], struct(8, 16))
    for use in found.values():
        assert [product.contracted for product in use.products] == [(1,)]


def test_conv():
    layer = eqx.filter_eval_shape(
        eqx.nn.Conv2d, 4, 6, 3, stride=2, padding=1, groups=2, key=key
    )
    fn = lambda m, x: jax.vmap(m)(x)
    (product,) = used(fn, layer, struct(5, 4, 9, 9))["weight"].products
    assert (product.contracted, product.rows) == ((1, 2, 3), 5 * 5 * 5)


def test_tied_embedding():
    fn = lambda w, ids: w[ids] @ w.T
    use = used(fn, struct(32, 16), struct(7, dtype=jnp.int32))[""]
    assert [(p.contracted, p.rows) for p in use.products] == [((1,), 7)]
    assert use.others == ("gather",)


def test_lost():
    layer = eqx.nn.WeightNorm(eqx.nn.Linear(16, 8, key=key))
    found = used(lambda m, x: m(x), layer, struct(16))
    weights = [use for name, use in found.items() if name.endswith("layer.weight")]
    assert [use.products for use in weights] == [()] and weights[0].others != ()


def test_custom_derivatives_and_branches():
    @jax.custom_vjp
    def product(w, x):
        return x @ w

    product.defvjp(lambda w, x: (product(w, x), (w, x)), lambda res, g: res)
    jvp = jax.custom_jvp(lambda w, x: x @ w)
    jvp.defjvp(lambda primals, tangents: (jvp(*primals), jvp(*primals)))

    def fn(w, x, n):
        y = lax.cond(n > 0, lambda w: product(w, x), lambda w: jvp(w, x), w)
        return y @ lax.cond(n > 1, lambda w: w.T, lambda w: w.T, w)

    use = used(fn, struct(16, 6), struct(3, 16), struct(dtype=jnp.int32))[""]
    assert [p.contracted for p in use.products] == [(0,), (0,), (1,)]
    assert use.products[0].input == use.products[1].input
    assert use.others == ()


def test_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(
        lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    use = used(fn, struct(16, 6), struct(8, 16))[""]
    assert [(p.contracted, p.rows) for p in use.products] == [((0,), 2)]


def test_changed_numbers():
    params = {
        "softplus": struct(8, 16),
        "masked": struct(16, 4),
        "position": struct(3, 8),
        "table": struct(5, 8),
    }

    def fn(params, x):
        x = x + params["position"]  # (What is added to the inputs is no weight.)
        x = x @ jax.nn.softplus(params["softplus"])
        mask = jnp.tri(16, 4) > 0
        return x @ jnp.where(mask, params["masked"], 0) + jnp.sum(params["table"])

    found = used(fn, params, struct(3, 8))
    for name in ("softplus", "masked"):
        (product,) = found[name].changed
        assert (product.contracted, product.rows) == ((0,), 3)
        assert found[name].products == ()
        assert 1 in product.sources
    assert found["position"].changed == found["table"].changed == ()


def test_sources_of_inputs():
    params = {"a": struct(8, 16), "b": struct(16, 4)}
    found = used(lambda m, x: (x @ m["a"], m["a"] @ m["b"]), params, struct(3, 8))
    by_input, by_weight = found["a"].products
    assert (by_input.sources, by_weight.sources) == ({1}, {0})
