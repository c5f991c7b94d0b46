import itertools as it
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import normal


formats = (eqq.Int(2, 32, "minimum"), eqq.Int4(32), eqq.Int8(32))


def model():
    return eqx.nn.MLP(64, 48, 32, 2, key=jr.key(0))


def inputs(rows=200):
    return normal(rows, 64, seed=1)


def call(model, x):
    return jax.vmap(model)(x)


# What a weight loses is what its products lose, on the rows that it was met with.
@pytest.mark.thorough
def test_errors_of_products():
    mlp, x = model(), inputs()
    stats = eqq.calibrate(call, mlp, [x[:100], x[100:]])
    rows = eqq.sensitivity(mlp, stats, formats).rows
    assert [row.paths for row in rows] == [(f"layers.{i}.weight",) for i in range(3)]
    x = np.asarray(x, np.float64)
    for row, layer in zip(rows, mlp.layers):
        w = np.asarray(layer.weight, np.float64)
        assert row.size == w.size
        for format, bits, found in zip(formats, row.bits, row.errors):
            q = eqq.quantize(layer.weight, format, axis=-1)
            error = np.asarray(q.dequantize(), np.float64) - w
            np.testing.assert_allclose(
                found, np.sum((x @ error.T) ** 2) / 200, rtol=1e-4
            )
            assert bits == q.bits_per_weight
        x = np.maximum(x @ w.T + np.asarray(layer.bias, np.float64), 0)


def test_errors_of_a_stack():
    w, x = normal(3, 64, 32), normal(100, 64, seed=1)
    factors = np.array([1.0, 2.0, 5.0])

    def fn(tree, x):
        step = lambda carry, layer: (carry, layer[1] * x @ layer[0])
        return jax.lax.scan(step, None, (tree["w"], jnp.asarray(factors, x.dtype)))

    stats = eqq.calibrate(fn, {"w": w}, [x])
    (row,) = eqq.sensitivity({"w": w}, stats, formats).rows
    for format, found in zip(formats, row.errors):
        error = np.asarray(w - eqq.quantize(w, format).dequantize(), np.float64)
        products = factors[:, None, None] * (np.asarray(x, np.float64) @ error)
        np.testing.assert_allclose(found, np.sum(products**2) / 100, rtol=1e-4)


def test_without_statistics():
    mlp = model()
    found = eqq.sensitivity(mlp, formats=formats)
    for row, layer in zip(found.rows, mlp.layers):
        for format, error in zip(formats, row.errors):
            q = eqq.quantize(layer.weight, format, axis=-1)
            squares = np.sum(np.square(layer.weight - q.dequantize()))
            np.testing.assert_allclose(error, squares, rtol=1e-4)


def test_of_the_loss():
    mlp, x = model(), inputs()
    y = call(mlp, x)
    loss = eqx.filter_jit(lambda m: jnp.mean((call(m, x) - y) ** 2) + 1)
    found = eqq.sensitivity(mlp, formats=formats, loss=loss)
    for i, row in enumerate(found.rows):
        where = lambda m, i=i: m.layers[i].weight
        for format, error in zip(formats, row.errors):
            q = eqq.quantize(where(mlp), format, axis=-1)
            rounded = eqx.tree_at(where, mlp, q.dequantize())
            np.testing.assert_allclose(error, float(loss(rounded)) - 1, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_is_better(seed):
    rng = np.random.default_rng(seed)
    number = len(formats)
    rows = [
        eqq._report.SensitivityRow(
            (f"w{i}",),
            int(rng.integers(1, 5)) * 1000,
            tuple(np.sort(rng.uniform(1, 9, number))),
            tuple(10.0 ** rng.uniform(-6, 2, number)),
        )
        for i in range(5)
    ]
    found = eqq.Sensitivity(tuple(rows), formats, "")
    size = sum(row.size for row in rows)
    every = [
        (
            sum(row.size * row.bits[i] for row, i in zip(rows, chosen)) / size,
            sum(row.errors[i] for row, i in zip(rows, chosen)),
        )
        for chosen in it.product(range(number), repeat=len(rows))
    ]
    for bits in (4.5, 6.0, 9.0):
        allowed = [error for used, error in every if used <= bits]
        if not allowed:
            with pytest.raises(ValueError, match="`bits` should be"):
                found.allocate(bits)
            continue
        ((used, error),) = found.curve([bits])
        assert used <= bits + 1e-9
        assert error <= min(allowed) * (1 + 1e-5)


@pytest.mark.thorough
def test_a_model_for_a_number_of_bits():
    mlp = model()
    # What follows is met with larger inputs.
    mlp = eqx.tree_at(lambda m: m.layers[0].weight, mlp, 30 * mlp.layers[0].weight)
    stats = eqq.calibrate(call, mlp, [inputs()])
    rules = eqq.allocate(mlp, stats, 5.0, formats, example=inputs(2)[0])
    quantized = eqq.tree_quantize(mlp, rules, stats=stats, example=inputs(2)[0])
    each = [layer.weight for layer in quantized.layers]
    assert sum(8 * q.nbytes for q in each) <= 5.0 * sum(q.size for q in each)
    assert eqq.allocate(mlp, stats, 5.0, formats) == rules
    y = call(mlp, inputs())
    error = lambda m: float(jnp.mean((call(m, inputs()) - y) ** 2))
    same = eqq.tree_quantize(mlp, formats[0], stats=stats)
    assert error(quantized) < 0.5 * error(same)
    curve = eqq.sensitivity(mlp, stats, formats).curve([4.0, 5.0, 6.0, 9.0])
    assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in it.pairwise(curve))


def test_weights_that_stay_together():
    shared = normal(64, 64)
    tree = {
        "a[0]": normal(64, 64, seed=1),
        "a0": shared,
        "tied*": shared,
        "other": normal(64, 64, seed=2),
    }
    found = eqq.sensitivity(tree, formats=formats)
    assert [row.paths for row in found.rows] == [
        ("a0", "tied*"),
        ("a[0]",),
        ("other",),
    ]
    assert [row.size for row in found.rows] == [4096] * 3
    quantized = eqq.tree_quantize(tree, found.allocate(6.0))
    assert quantized["a0"] is quantized["tied*"]
    found = eqq.sensitivity(
        tree,
        formats=formats,
        together=lambda info: "pair" if info.path in ("a[0]", "tied*") else None,
    )
    # `a0` is the array that `tied*` is.
    assert [row.paths for row in found.rows] == [("a0", "a[0]", "tied*"), ("other",)]
    assert found.rows[0].size == 2 * 4096
    assert len(found.allocate(6.0).rules) == 4


def test_weights_with_the_same_path():
    tree = {"a.b": normal(64, 64), "a": {"b": 100 * normal(64, 64, seed=1)}}
    found = eqq.sensitivity(tree, formats=formats)
    assert [(row.paths, row.size) for row in found.rows] == [(("a.b",), 2 * 4096)]
    q = eqq.tree_quantize(tree, found.allocate(6.0))
    used = 8 * (q["a.b"].nbytes + q["a"]["b"].nbytes) / (2 * 4096)
    assert q["a.b"].format == q["a"]["b"].format and used <= 6


@pytest.mark.thorough
def test_by_a_method():
    mlp = model()
    stats = eqq.calibrate(call, mlp, [inputs()])
    nearest = eqq.sensitivity(mlp, stats, ["int4"])
    searched = eqq.sensitivity(mlp, stats, ["int4"], method=eqq.ScaleSearch())
    solved = eqq.sensitivity(mlp, stats, ["int4"], method=eqq.GPTQ())
    for a, b, c in zip(nearest.rows, searched.rows, solved.rows):
        assert a.errors > b.errors > c.errors


def test_a_format_that_takes_no_method():
    tree = {"signs": jnp.sign(normal(64, 32))}
    nearest = eqq.sensitivity(tree, formats=["rsrternary", "int4"])
    found = eqq.sensitivity(
        tree, formats=["rsrternary", "int4"], method=eqq.ScaleSearch()
    )
    assert found.rows[0].errors[0] == nearest.rows[0].errors[0] == 0
    with pytest.raises(ValueError, match="`signs`: `method` ScaleSearch.*RSRTernary"):
        eqq.sensitivity(tree, formats=["rsrternary"], method=eqq.ScaleSearch())


def test_weights_that_statistics_do_not_know():
    tree = {"known": normal(64, 32), "unknown": normal(64, 32, seed=1)}
    stats = eqq.calibrate(lambda m, x: x @ m["known"], tree, [inputs()])
    with pytest.warns(UserWarning, match="`unknown` entered no.*unit var"):
        found = eqq.sensitivity(tree, stats, formats)
    plain = eqq.sensitivity(tree, None, formats)
    assert found.rows[1] == plain.rows[1]
    assert found.rows[0] != plain.rows[0]


def test_errors():
    mlp = model()
    with pytest.raises(ValueError, match="`bits` should be at least 3.*Got 1"):
        eqq.allocate(mlp, bits=1, formats=[eqq.Int(2, 64, "minimum")])
    with pytest.raises(ValueError, match="`formats` should have at least"):
        eqq.allocate(mlp, formats=[])
    with pytest.raises(ValueError, match="should have weights to quantize"):
        eqq.allocate({"bias": jnp.ones(3)})
    with pytest.raises(ValueError, match="`layers.0.weight` is a `jax.ShapeDtype"):
        eqq.allocate(eqx.filter_eval_shape(model))
    other = eqq.calibrate(lambda m, x: x @ m["w"], {"w": normal(64, 32)}, [inputs()])
    with pytest.raises(ValueError, match="should be of this model"):
        eqq.allocate(mlp, other)
    nothing = eqq.calibrate(call, mlp, [inputs(rows=0)])
    refused = pytest.raises(ValueError, match="`stats` should come from batches with")
    with pytest.warns(UserWarning, match="fewer rows"), refused:
        eqq.allocate(mlp, nothing)
    with pytest.raises(ValueError, match="`method` GPTQ.*needs what"):
        eqq.allocate(mlp, method=eqq.GPTQ())
    with pytest.raises(ValueError, match="`AWQ` scales other.*method=ScaleSearch"):
        eqq.allocate(mlp, method=eqq.AWQ())
    with pytest.raises(ValueError, match="Could not quantize `layers.0.weight`"):
        eqq.allocate(mlp, formats=[eqq.RSRBinary(8)])


def test_arguments_that_are_none_of_these(unchecked):
    with pytest.raises(TypeError, match="`stats` should be what"):
        eqq.allocate(model(), [inputs()])
    with pytest.raises(TypeError, match="`method` should be a method"):
        eqq.allocate(model(), method="gptq")
    for formats in ("nf4", eqq.NF4(), None):
        with pytest.raises(TypeError, match="`formats` should be a sequence"):
            eqq.allocate(model(), formats=formats)
    with pytest.raises(TypeError, match="`bits` should be a number. Got '4'"):
        eqq.allocate(model(), bits="4", formats=["int8"])


def test_a_loss_that_is_not_finite():
    loss = lambda m: jnp.where(jnp.any(m.layers[1].weight == 0), jnp.nan, 1.0)
    with pytest.raises(ValueError, match="`loss` should be finite.*`layers.1.weight`"):
        eqq.allocate(model(), formats=[eqq.Ternary()], loss=loss)


def test_prints_as_a_table(monkeypatch):
    monkeypatch.setattr(
        "shutil.get_terminal_size", lambda: types.SimpleNamespace(columns=80)
    )
    lines = repr(eqq.sensitivity(model(), formats=formats)).splitlines()
    assert lines[0].split() == ["weight", "numbers", "4.00", "5.00", "9.00"]
    assert lines[2].split()[:2] == ["layers.0.weight", "2,048"]
    assert "4.00 bits  Int(2, 32" in "\n".join(lines)
    assert lines[-1] == "Squared errors of the weights."


def test_figure():
    found = eqq.sensitivity(model(), formats=formats)
    budgets = [4.0, 5.0, 6.5, 9.0]
    curve, weights, *_ = found.figure(budgets).axes
    np.testing.assert_allclose(
        curve.lines[0].get_xydata(), found.curve(budgets), rtol=1e-6
    )
    (image,) = weights.images
    chosen = np.asarray(image.get_array())
    assert chosen.tolist() == [list(c) for c in zip(*map(found.chosen, budgets))]
    labels = [label.get_text() for label in weights.get_yticklabels()]
    assert labels == [row.paths[0] for row in found.rows]
    # By default, from the smallest formats to the largest.
    _, weights, *_ = found.figure().axes
    labels = [float(label.get_text()) for label in weights.get_xticklabels()]
    assert labels[0] == 4.0 and labels[-1] <= 9.0 and labels[1] - labels[0] == 0.5
    # Also where there is no multiple of half a bit between them.
    odd = eqq.Int4(32, symmetric=False)
    _, weights, *_ = eqq.sensitivity(model(), formats=[odd]).figure().axes
    assert len(weights.get_xticklabels()) == 1
