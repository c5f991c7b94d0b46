import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq

from .test_uses import dynamic, looped, mapped, scanned, split, unrolled


key = jr.key(0)
x = np.asarray(jr.normal(key, (8, 16)))


def gram(rows):
    """The Gram of rows, in float64."""
    rows = np.asarray(rows, np.float64)
    rows = rows.reshape(-1, rows.shape[-1])
    return rows.T @ rows


def check(found, value, rows=None):
    assert found.value.dtype == jnp.float32
    got = np.asarray(found.value, np.float64)
    value = np.broadcast_to(value, got.shape)
    assert np.abs(got - value).max() <= 1e-5 * np.abs(value).max()
    if rows is not None:
        np.testing.assert_array_equal(np.asarray(found.rows), rows)


def linear(layer, x):
    out = np.asarray(x, np.float64) @ np.asarray(layer.weight, np.float64).T
    return out + np.asarray(layer.bias, np.float64)


def apply(m, x):
    return jax.vmap(m)(x)


def remat(m, x):
    return jax.jit(jax.checkpoint(jax.vmap(m)))(x)


@pytest.mark.parametrize("fn", [apply, remat])
def test_mlp(fn):
    mlp = eqx.nn.MLP(16, 4, 24, depth=1, key=key)
    stats = eqq.calibrate(fn, mlp, [x, x[:5]])
    hidden = np.maximum(linear(mlp.layers[0], x), 0)
    check(stats["layers.0.weight"], gram(x) + gram(x[:5]), 13)
    check(stats["layers.1.weight"], gram(hidden) + gram(hidden[:5]), 13)
    assert list(stats) == ["layers.0.weight", "layers.1.weight"]
    assert stats["layers.0.weight"].contracted == (1,)
    assert stats.few_rows == ("layers.0.weight", "layers.1.weight")
    assert stats.incomplete == ()
    twice = stats + stats
    check(twice["layers.0.weight"], 2 * (gram(x) + gram(x[:5])), 26)


class RNN(eqx.Module):
    cell: eqx.nn.LSTMCell

    def __call__(self, xs):
        def step(carry, x):
            new = self.cell(x, carry)
            return new, carry[0]

        zero = jnp.zeros(self.cell.hidden_size)
        return lax.scan(step, (zero, zero), xs)[1]


def test_lstm():
    rnn = RNN(eqx.nn.LSTMCell(16, 12, key=key))
    xs = np.asarray(jr.normal(key, (3, 5, 16)))
    stats = eqq.calibrate(apply, rnn, [xs])
    check(stats["cell.weight_ih"], gram(xs), 15)
    check(stats["cell.weight_hh"], gram(apply(rnn, xs)), 15)


def test_multihead_attention():
    layer = eqx.nn.MultiheadAttention(4, 16, key=key)
    xs = np.asarray(jr.normal(key, (3, 9, 16)))
    stats = eqq.calibrate(lambda m, x: jax.vmap(lambda x: m(x, x, x))(x), layer, [xs])
    for name in ("query", "key", "value"):
        check(stats[f"{name}_proj.weight"], gram(xs), 27)
    assert len(jtu.tree_leaves(stats)) == 4  # two Grams, and their rows
    assert "as query_proj.weight" in repr(stats)


@pytest.mark.parametrize("fn", [scanned, unrolled, split, looped, dynamic])
def test_stacks(fn):
    make = lambda key: eqx.nn.Linear(16, 16, key=key)
    stack = eqx.filter_vmap(make)(jr.split(key, 3))
    values, h = [], np.asarray(x, np.float64)
    for i in range(3):
        values.append(gram(h))
        h = h + linear(jtu.tree_map(lambda a: a[i], stack), h)
    stats = eqq.calibrate(fn, stack, [x])
    assert stats["weight"].value.shape == (3, 1, 16, 16)
    check(stats["weight"], np.stack(values)[:, None], 8)


def test_ensemble():
    make = lambda key: eqx.nn.MLP(16, 4, 12, depth=1, key=key)
    stack = eqx.filter_vmap(make)(jr.split(key, 3))
    stats = eqq.calibrate(mapped, stack, [x])
    assert stats["layers.0.weight"].value.shape == (1, 1, 16, 16)
    check(stats["layers.0.weight"], gram(x), 8)
    first = stack.layers[0]
    hidden = [
        gram(np.maximum(linear(jtu.tree_map(lambda a: a[i], first), x), 0))
        for i in range(3)
    ]
    check(stats["layers.1.weight"], np.stack(hidden)[:, None], 8)


@pytest.mark.parametrize("groups", [1, 2])
def test_conv(groups):
    conv = eqx.nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=groups, key=key)
    image = np.asarray(jr.normal(key, (5, 4, 9, 9)))
    padded = np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1)))
    parts = [
        padded[:, :, i : i + 9 : 2, j : j + 9 : 2] for i in range(3) for j in range(3)
    ]
    rows = np.stack(parts, 2).reshape(5, groups, 4 // groups * 9, 25)
    value = np.stack([gram(np.moveaxis(rows[:, g], 1, 2)) for g in range(groups)])
    stats = eqq.calibrate(apply, conv, [image])
    assert stats["weight"].contracted == (1, 2, 3)
    check(stats["weight"], value, 125)


# Of weights that contract nothing but axes of size one.
def test_one_input():
    one = np.asarray(jr.normal(key, (8, 1)))
    mlp = eqx.nn.MLP(1, 1, 6, depth=1, key=key)
    stats = eqq.calibrate(apply, mlp, [one])
    hidden = np.maximum(linear(mlp.layers[0], one), 0)
    check(stats["layers.0.weight"], gram(one), 8)
    check(stats["layers.1.weight"], gram(hidden), 8)
    assert stats["layers.0.weight"].contracted == (1,)
    assert stats.incomplete == ()
    q = eqq.tree_quantize(mlp, eqq.Int4(64), min_size=0, stats=stats)
    assert eqq.is_quantized(q.layers[0].weight)
    w = {"w": jnp.ones((1, 5))}
    found = eqq.calibrate(lambda m, x: x @ m["w"], w, [one])["w"]
    check(found, gram(one), 8)
    assert found.contracted == (0,)
    conv = eqx.nn.Conv1d(4, 8, 1, groups=4, key=key)
    signal = np.asarray(jr.normal(key, (2, 4, 9)))
    found = eqq.calibrate(apply, conv, [signal])["weight"]
    wanted = np.sum(np.float64(signal) ** 2, (0, 2))
    assert found.rows.size == 4 and found.value.size == 4
    np.testing.assert_allclose(found.value.ravel(), wanted, rtol=1e-6)
    with pytest.raises(ValueError, match="`fn` should apply `model`"):
        outer = lambda m, x: jnp.einsum("i,j->ij", m["v"], x[:, 0])
        eqq.calibrate(outer, {"v": jnp.ones(5)}, [one])


def test_axes():
    fn = lambda ws, x: [
        jnp.einsum("thd,hdo->to", x.reshape(8, 4, 4), ws["heads"]),
        jnp.einsum("thd,hdo->tho", x.reshape(8, 4, 4), ws["each"]),
        jnp.einsum("thd,dho->tho", x.reshape(8, 4, 4), ws["part"].reshape(4, 4, 3)),
        [x @ a.T for a in jnp.split(ws["fused"], 3)],
        x @ jnp.concatenate([ws["joined"], ws["joined"]]).T,
    ]
    shapes = dict(
        heads=(4, 4, 6), each=(4, 4, 3), part=(4, 12), fused=(12, 16), joined=(5, 16)
    )
    ws = {name: jr.normal(key, shape) for name, shape in shapes.items()}
    stats = eqq.calibrate(fn, ws, [x])
    assert stats["heads"].contracted == (0, 1)
    check(stats["heads"], gram(x), 8)
    heads = np.stack([gram(x[:, 4 * i : 4 * i + 4]) for i in range(4)])
    check(stats["each"], heads[:, None], 8)
    check(stats["part"], heads, 8)  # each of four parts of the axis
    check(stats["fused"], 3 * gram(x), 24)
    check(stats["joined"], 2 * gram(x), 16)


def test_branches_and_custom_derivatives():
    @jax.custom_vjp
    def product(w, x):
        return x @ w

    product.defvjp(lambda w, x: (product(w, x), (w, x)), lambda res, g: res)

    def fn(ws, x):
        taken, other = x.sum() < 1e9, x.sum() > 1e9
        y = lax.cond(taken, lambda w: product(w, x), lambda w: 0 * (x @ w), ws["a"])
        z = lax.cond(other, lambda w: x @ w, lambda w: jnp.zeros((8, 6)), ws["b"])
        return y + z + x @ ws["c"]

    ws = {name: jr.normal(key, (16, 6)) for name in "abc"}
    stats = eqq.calibrate(fn, ws, [x])
    check(stats["a"], gram(x), 8)
    check(stats["b"], 0 * gram(x), 0)
    check(stats["c"], gram(x), 8)


# The same inputs, but not equally often.
def test_not_shared():
    def fn(ws, x):
        step = lambda c, _: (c + (x @ ws["a"]).sum(), None)
        return lax.scan(step, 0.0, None, length=3)[0], x @ ws["b"]

    ws = {name: jr.normal(key, (16, 6)) for name in "ab"}
    stats = eqq.calibrate(fn, ws, [x])
    check(stats["a"], 3 * gram(x), 24)
    check(stats["b"], gram(x), 8)


def test_tied_embedding():
    ids = np.array([1, 5, 5, 0, 31])
    w = jr.normal(key, (32, 16))
    stats = eqq.calibrate(lambda w, ids: w[0][ids] @ w[0].T, [w], [ids])
    check(stats["0"], gram(w[ids]), 5)


# The inputs of a Gram come in the order of the axes that are asked for.
def test_order_of_axes():
    images = jr.normal(key, (2, 5, 5, 3))

    def fn(w, images):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            images, w["filters"], (1, 1), "VALID", dimension_numbers=numbers
        )
        return y, x @ w["swapped"].transpose(1, 0, 2).reshape(16, 6)

    shapes = {"filters": (2, 2, 3, 6), "swapped": (2, 8, 6)}
    w = {name: jr.normal(key, shape) for name, shape in shapes.items()}
    stats = eqq.calibrate(fn, w, [images])
    parts = [images[:, i : i + 4, j : j + 4] for i in range(2) for j in range(2)]
    rows = {
        "filters": np.stack(parts, -2).reshape(-1, 12),
        "swapped": x.reshape(8, 8, 2).swapaxes(1, 2).reshape(8, 16),
    }
    for name, axes in {"filters": (0, 1, 2), "swapped": (0, 1)}.items():
        found = stats.along(name, axes, shapes[name])
        assert found.contracted == axes
        check(found, gram(rows[name]), len(rows[name]))


# The table is a weight of two kinds of product, which have inputs of their own.
def test_file(tmp_path):
    def fn(w, x):
        part = x[:, :4] @ w["c"].reshape(4, 4, 6)[1]
        return x @ w["a"], x @ w["b"], x[:, :6] @ w["a"].T, part

    w = {name: jr.normal(key, (16, 6)) for name in "abc"}
    stats = eqq.calibrate(fn, w, [x], diagonal_above=8)
    with pytest.raises(KeyError, match="several axes"):
        stats["a"]
    eqq.save(tmp_path / "stats.safetensors", stats.as_tree())
    found = eqq.Statistics.from_tree(eqq.load(tmp_path / "stats.safetensors"))
    assert found.incomplete == stats.incomplete != ()
    assert list(found) == ["a", "b"] and repr(found) == repr(stats)
    check(found["a", (1,)], gram(x[:, :6]), 8)
    check(found["b"], np.diagonal(gram(x)), 8)
    assert found["b"].is_diagonal and not found["a", (1,)].is_diagonal
    check((found + stats)["b"], 2 * np.diagonal(gram(x)), 16)


def test_bfloat16():
    w = jr.normal(key, (16, 4)).astype(jnp.bfloat16)
    low = jnp.asarray(x, jnp.bfloat16)
    stats = eqq.calibrate(lambda w, x: x @ w[0], [w], [low] * 3)
    check(stats["0"], 3 * gram(low.astype(jnp.float32)), 24)


def test_shard_map():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def fn(w, x):
        call = lambda w, x: lax.scan(lambda c, _: (c, x @ w), 0, None, length=2)[1]
        specs = dict(in_specs=(P(), P("data")), out_specs=P(None, "data"))
        return jax.shard_map(call, mesh=mesh, **specs)(w["w"], x)

    stats = eqq.calibrate(fn, {"w": jr.normal(key, (16, 6))}, [x])
    check(stats["w"], 2 * gram(x), 16)


# The loop is outside, and its index is met inside.
def test_shard_map_in_scan():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = dict(in_specs=(P(), P("data")), out_specs=P("data"))
    product = jax.shard_map(lambda w, x: x @ w, mesh=mesh, **specs)

    def fn(w, x):
        return lax.scan(lambda x, w: (product(w, x), None), x, w["w"])[0]

    w = jr.normal(key, (2, 16, 16))
    stats = eqq.calibrate(fn, {"w": w}, [x])
    second = x.astype(np.float64) @ np.asarray(w[0], np.float64)
    check(stats["w"], np.stack([gram(x), gram(second)])[:, None], 8)


def test_index_in_a_branch():
    def fn(w, x):
        i = (x.sum() < 1e9).astype(jnp.int32)
        choose = lambda w, i: w[i]
        one = lax.cond(x.sum() < 1e9, choose, lambda w, i: w[0], w["w"], i)
        return x @ one, lax.cond(i == 1, lambda w: x @ w[i], lambda w: x @ w[0], w["w"])

    stats = eqq.calibrate(fn, {"w": jr.normal(key, (2, 16, 4))}, [x])
    check(stats["w"], np.stack([0 * gram(x), gram(x)])[:, None], [[0], [8]])
    ((path, reason),) = stats.incomplete  # the product with `one`
    assert path == "w" and "`cond`" in reason


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded(kind):
    mlp = eqx.nn.MLP(16, 4, 24, depth=1, key=key)
    fn = lambda m, x: jax.nn.relu(x @ m.layers[0].weight.T) @ m.layers[1].weight.T
    hidden = np.maximum(x @ np.asarray(mlp.layers[0].weight).T, 0)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        mlp = eqx.filter_shard(mlp, whole)
        stats = eqq.calibrate(fn, mlp, [jax.device_put(x, split)] * 2)
    check(stats["layers.0.weight"], 2 * gram(x), 16)
    check(stats["layers.1.weight"], 2 * gram(hidden), 16)


# Of rows with two axes: only if the first of them alone is split are they joined.
@pytest.mark.parametrize("split", [("data",), (None, "data"), ("data", None, "model")])
def test_sharded_rows_of_two_axes(split):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    w = place(jr.normal(key, (2, 8, 6)), *split[2:])
    rows = np.asarray(jr.normal(key, (8, 4, 2, 8)))
    out = dict(out_sharding=P(*split[:2]))
    fn = lambda m, x: jnp.einsum("bthc,hcn->btn", x, m["w"], **out)
    with jax.set_mesh(mesh):
        stats = eqq.calibrate(fn, {"w": w}, [place(rows, *split)] * 2)
    check(stats["w"], 2 * gram(rows.reshape(32, 16)), 64)


def test_what_is_lost():
    w = jr.normal(key, (16, 16))
    fn = lambda w, x: x @ jnp.sort(w["w"])
    with pytest.raises(ValueError, match="`fn`.*'w'"):
        eqq.calibrate(fn, {"w": w}, [x])


def test_incomplete():
    fn = lambda w, x: (x @ w[0], x[:, :4] @ w[0].reshape(4, 4, 6)[1])
    stats = eqq.calibrate(fn, [jr.normal(key, (16, 6))], [x])
    assert [path for path, _ in stats.incomplete] == ["0"]
    # Experts are reordered before each meets its rows.
    sizes = jnp.array([3, 0, 4, 1], jnp.int32)
    fn = lambda w, x: (x @ w[1], lax.ragged_dot(x, w[0][sizes[::-1] % 4], sizes))
    model = [jr.normal(key, (4, 16, 6)), jr.normal(key, (16, 6))]
    stats = eqq.calibrate(fn, model, [x])
    assert [path for path, _ in stats.incomplete] == ["0"]


def test_errors():
    mlp = eqx.nn.MLP(16, 4, 24, depth=0, key=key)
    with pytest.raises(ValueError, match="`batches`.*Got none"):
        eqq.calibrate(apply, mlp, [])
    with pytest.raises(ValueError, match="`fn`.*none of them"):
        eqq.calibrate(lambda m, x: x, mlp, [x])
    with pytest.raises(ValueError, match="`batches`.*one structure"):
        eqq.calibrate(lambda m, x: apply(m, x[0]), mlp, [(x,), (x, x)])
    with pytest.raises(ValueError, match="layers.0.weight.*NaN"):
        eqq.calibrate(apply, mlp, [x, np.full_like(x, np.nan)])
    with pytest.raises(ValueError, match="several|statistics of the same"):
        other = eqx.nn.Linear(16, 3, key=key)
        eqq.calibrate(apply, mlp, [x]) + eqq.calibrate(apply, other, [x])


def test_arrays_with_the_same_path():
    w = np.asarray(jr.normal(key, (16, 16)))
    product = lambda w, x: (x @ w["a.b"]) @ w["a"]["b"]
    with pytest.raises(ValueError, match="distinct paths.*Got several.*'a.b'"):
        eqq.calibrate(product, {"a.b": w, "a": {"b": 2 * w}}, [x])


def test_what_has_no_inputs_to_measure(unchecked):
    mlp = eqx.nn.MLP(16, 4, 24, depth=0, key=key)
    for bad in (None, 3):
        with pytest.raises(ValueError, match=rf"`batches` .*iterable.*Got {bad}"):
            eqq.calibrate(apply, mlp, bad)
    with pytest.raises(ValueError, match="`model` .*arrays. Got none.*ShapeDtypeS"):
        eqq.calibrate(apply, eqx.filter_eval_shape(lambda: mlp), [x])
    with pytest.raises(ValueError, match="`batches`.*outside of `jax.jit`.*traced"):
        jax.jit(lambda x: eqq.calibrate(apply, mlp, [x])["layers.0.weight"].value)(x)
    for replaced in ("QuantizedArray", "LowPrecision"):
        of = eqq.train.tree_compute if replaced[0] == "L" else eqq.tree_quantize
        with pytest.raises(ValueError, match=f"It has a {replaced} .*pass arrays"):
            eqq.calibrate(apply, of(mlp, min_size=0), [x])


def test_compiles_once():
    traces = 0

    def fn(m, x):
        nonlocal traces
        traces += 1
        return x @ m[0]

    batches = (x + np.float32(i) for i in range(4))
    stats = eqq.calibrate(fn, [np.ones((16, 4), np.float32)], batches)
    check(stats["0"], sum(gram(x + np.float32(i)) for i in range(4)), 32)
    assert traces == 1


def test_complex_inputs():
    w = jr.normal(key, (16, 4))
    fn = lambda w, x: jnp.dot(lax.complex(x, 2 * x), w["w"])
    with jax.numpy_dtype_promotion("standard"):
        check(eqq.calibrate(fn, {"w": w}, [x])["w"], 5 * gram(x), 8)
