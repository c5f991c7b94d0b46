"""Biases of PyTorch in layers of Equinox: axes of size one, and sums. Against the
formulas of PyTorch's documentation, in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.interop import Join, load_into, Split, Sum, write_gguf


_size, _inputs = 16, 12


def _random(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_bias_of_a_convolution(rank):
    key = jax.random.key(0)
    make = lambda: eqx.nn.Conv(rank, 3, 5, 2, key=key)
    state = {"weight": _random(5, 3, *(2,) * rank), "bias": _random(5)}
    for skeleton in (make(), eqx.filter_eval_shape(make)):
        model = load_into(skeleton, state)
        assert model.bias.shape == (5, *(1,) * rank)
        np.testing.assert_array_equal(model.bias.reshape(5), state["bias"])
    x = _random(3, *(4,) * rank, seed=1)
    assert model(jnp.asarray(x)).shape == (5, *(3,) * rank)


def test_axes_that_are_not_added():
    struct = lambda *shape: {"a": jax.ShapeDtypeStruct(shape, jnp.float32)}
    for given, wanted in (((5,), (1, 5, 1)), ((2, 3), (2, 1, 3)), ((), (1, 1))):
        found = load_into(struct(*wanted), {"a": _random(*given)})["a"]
        np.testing.assert_array_equal(found, _random(*given).reshape(wanted))
    # They are not removed, and others are not mixed up.
    for given, wanted in (((5, 1), (5,)), ((2, 3), (3, 1, 2)), ((1, 5), (5, 1))):
        with pytest.raises(ValueError, match="'a' should have shape"):
            load_into(struct(*wanted), {"a": _random(*given)})
    q = eqq.quantize(_random(8, 64), "int8", axis=-1)
    with pytest.raises(ValueError, match="'a' should have shape"):
        load_into(struct(8, 1, 64), {"a": q})


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _state(name, gates):
    n = gates * _size
    return {
        f"{name}.weight_ih_l0": 0.3 * _random(n, _inputs, seed=1),
        f"{name}.weight_hh_l0": 0.3 * _random(n, _size, seed=2),
        f"{name}.bias_ih_l0": _random(n, seed=3),
        f"{name}.bias_hh_l0": _random(n, seed=4),
    }


def _affine(state, name, x, h):
    parts = {k.removeprefix(f"{name}."): w.astype(float) for k, w in state.items()}
    inputs = parts["weight_ih_l0"] @ x + parts["bias_ih_l0"]
    return inputs, parts["weight_hh_l0"] @ h + parts["bias_hh_l0"]


_x, _h, _c = _random(_inputs, seed=5), _random(_size, seed=6), _random(_size, seed=7)


def test_lstm():
    state = _state("lstm", 4)
    rename = {
        Sum("lstm.bias_ih_l{i}", "lstm.bias_hh_l{i}"): "{i}.bias",
        "lstm.{weight}_l{i}": "{i}.{weight}",
    }
    make = lambda: [eqx.nn.LSTMCell(_inputs, _size, key=jax.random.key(0))]
    (cell,) = load_into(eqx.filter_eval_shape(make), state, rename)
    i, f, g, o = np.split(np.add(*_affine(state, "lstm", _x, _h)), 4)
    c = _sigmoid(f) * _c + _sigmoid(i) * np.tanh(g)
    expected = _sigmoid(o) * np.tanh(c), c
    found = eqx.filter_jit(cell)(_x, (jnp.asarray(_h), jnp.asarray(_c)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_gru():
    state = _state("gru", 3)
    parts = lambda x: Split(f"gates_{x}", f"new_{x}", sizes=(2 * _size, _size))
    rename = [
        {"gru.weight_ih_l0": "weight_ih", "gru.weight_hh_l0": "weight_hh"},
        {f"gru.bias_{x}_l0": parts(x) for x in ("ih", "hh")},
        {Sum("gates_ih", "gates_hh"): "gates"},
        {Join("gates", "new_ih"): "bias", "new_hh": "bias_n"},
    ]
    make = lambda: eqx.nn.GRUCell(_inputs, _size, key=jax.random.key(0))
    cell = load_into(eqx.filter_eval_shape(make), state, rename)
    inputs, hidden = (np.split(a, 3) for a in _affine(state, "gru", _x, _h))
    r, z = (_sigmoid(inputs[i] + hidden[i]) for i in range(2))
    new = np.tanh(inputs[2] + r * hidden[2])
    expected = (1 - z) * new + z * _h
    found = eqx.filter_jit(cell)(_x, jnp.asarray(_h))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_rule_that_comes_too_late():
    state = _state("lstm", 4)
    make = lambda: [eqx.nn.LSTMCell(_inputs, _size, key=jax.random.key(0))]
    model = eqx.filter_eval_shape(make)
    both = Sum("lstm.bias_ih_l{i}", "lstm.bias_hh_l{i}")
    text = "`Sum('lstm.bias_ih_l{i}', 'lstm.bias_hh_l{i}')` does not apply to "
    rename = {"lstm.{kind}_l{i}": "{i}.{kind}", both: "{i}.bias"}
    with pytest.raises(ValueError) as e:
        load_into(model, state, rename)
    (line,) = (x for x in str(e.value).split("\n- ") if "does not apply" in x)
    assert f"{text}'lstm.bias_" in line
    assert "since `'lstm.{kind}_l{i}'` comes before it" in line
    load_into(model, state, dict(reversed(rename.items())))
    # One of the two.
    rename = {"lstm.bias_hh*": None, both: "{i}.bias", "lstm.{kind}_l{i}": "{i}.{kind}"}
    with pytest.raises(ValueError, match=r"apply to 'lstm.bias_hh_l0', since `'lstm.b"):
        load_into(model, state, rename)
    rename = {"lstm.bias_ih*": None, "lstm.{kind}_l{i}": "{i}.{kind}", both: "{i}.bias"}
    with pytest.warns(UserWarning, match="does not apply to 'lstm.bias_hh_l0'"):
        load_into(
            model, {"lstm.bias_hh_l0": state["lstm.bias_hh_l0"]}, rename, strict=False
        )
    with pytest.raises(ValueError) as e:
        load_into(model, state, {both: "{i}.bias"})
    assert "does not apply" not in str(e.value)


def test_sums(tmp_path):
    rules = {Sum("a.{i}", "b.{i}", "c.{i}"): "x"}
    state = {
        f"{x}.{i}": _random(3, seed=i + k) for k, x in enumerate("abc") for i in (0, 1)
    }
    model = {"x": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    found = load_into(model, state, rules)["x"]
    expected = [sum(state[f"{x}.{i}"].astype(float) for x in "abc") for i in (0, 1)]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    # In 16 bits, rounded once.
    half = {k: x.astype(jnp.bfloat16) for k, x in state.items()}
    model = {"x": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}
    found = load_into(model, half, rules)["x"]
    wide = [sum(half[f"{x}.{i}"].astype(np.float32) for x in "abc") for i in (0, 1)]
    np.testing.assert_array_equal(found, np.stack(wide).astype(jnp.bfloat16))
    q = eqq.quantize(_random(8, 64), "int8", axis=-1)
    for a, b, match in (
        (q, q, "only arrays of floats"),
        (np.zeros(3, np.int32), np.zeros(3, np.int32), "only arrays of floats"),
        (_random(3), _random(4), "differ in their shape"),
        (_random(3), None, "there is no 'b'"),
    ):
        tree = {"a": a} if b is None else {"a": a, "b": b}
        with pytest.raises(ValueError, match=match):
            load_into({"x": jnp.zeros(3)}, tree, {Sum("a", "b"): "x"})
    write_gguf(tmp_path / "a.gguf", {"a": _random(3), "b": _random(3)}, rename={
        Sum("a", "b"): "x"
    })  # fmt: skip
    assert list(eqq.interop.open(tmp_path / "a.gguf")) == ["x"]
    with pytest.raises(TypeError, match="`Sum` should have two names or more"):
        Sum("a")
    with pytest.raises(ValueError, match="cannot join, add, split"):
        eqq.interop.renamed("a", {Sum("a", "b"): "x"})
