"""Adapters of weights whose products contract other axes than one of the last two."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.train import LoRA, lora, lora_only, merge_lora, tree_compute, with_lora

from ..helpers import normal


class Product(eqx.Module):
    kernel: jax.Array
    equation: str = eqx.field(static=True)

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.kernel)


# Equation, shape of the weight, shape of the inputs; the matrix: stack, rows, columns.
products = {
    "heads": ("btd,dnh->btnh", (64, 8, 32), (2, 3, 64), ((), 256, 64)),
    "out": ("btnh,nhd->btd", (8, 16, 48), (2, 3, 8, 16), ((), 48, 128)),
    "out, rows first": ("btnh,dnh->btd", (48, 8, 16), (2, 3, 8, 16), ((), 48, 128)),
    "weight first": ("dnh,tnh->dt", (48, 8, 16), (3, 8, 16), ((), 48, 128)),
    "three": ("ti,iabc->tabc", (64, 2, 4, 8), (3, 64), ((), 64, 64)),
    "experts": ("eti,eio->eto", (4, 32, 48), (4, 3, 32), ((4,), 48, 32)),
    "matrix": ("ti,io->to", (64, 48), (3, 64), ((), 48, 64)),
}


def made(name, example=True):
    equation, shape, of_x, matrix = products[name]
    if name == "weight first":
        model = First(normal(*shape), equation)
    else:
        model = Product(normal(*shape), equation)
    x = normal(*of_x, seed=1)
    q = eqq.tree_quantize(model, "int8", example=x, min_size=0)
    assert eqq.is_quantized(q.kernel)
    return model, q, x, matrix


class First(Product):
    def __call__(self, x):
        return jnp.einsum(self.equation, self.kernel, x)


def trained(model):
    w = model.kernel
    return eqx.tree_at(lambda m: m.kernel.b, model, normal(*w.b.shape, seed=2))


def as_array(w, axes, matrix):
    """The adapter's part of the array, by NumPy in float64."""
    a, b = np.asarray(w.a, float), np.asarray(w.b, float)
    stack, _, _ = matrix
    rows = w.scale * b @ a
    shape, lead = w.shape, len(stack)
    axes = sorted(i % len(shape) for i in axes)
    outs = [i for i in range(lead, len(shape)) if i not in axes]
    order = [*range(lead), *outs, *axes]
    return rows.reshape([shape[i] for i in order]).transpose(np.argsort(order))


@pytest.mark.examples(3)
@pytest.mark.parametrize("dora", (False, True))
@pytest.mark.parametrize("name", products)
def test_adapters_are_of_the_matrix(name, dora, tmp_path):
    model, q, x, matrix = made(name)
    adapted, spec = lora(q, 4, min_size=0, dora=dora, key=jr.key(1))
    w, (stack, n, k) = adapted.kernel, matrix
    assert w.a.shape == (*stack, 4, k) and w.b.shape == (*stack, n, 4)
    y = eqx.filter_jit(q)(x)
    np.testing.assert_allclose(eqx.filter_jit(adapted)(x), y, rtol=1e-4, atol=1e-3)

    new = trained(adapted)
    axis = q.kernel.axis
    axes = (axis,) if isinstance(axis, int) else axis
    base = np.asarray(q.kernel.dequantize(), float)
    whole = base + as_array(new.kernel, axes, matrix)
    if dora:
        norms = [np.sqrt((v**2).sum(axes, keepdims=True)) for v in (base, whole)]
        whole = whole * norms[0] / norms[1]
    *operands, _ = products[name][0].replace("->", ",").split(",")
    both = (whole, x) if name == "weight first" else (x, whole)
    expected = np.einsum(products[name][0], *(np.asarray(v, float) for v in both))
    size = np.abs(expected).max()
    run = eqx.filter_jit(lambda m, x: m(x))
    assert np.abs(np.asarray(run(new, x)) - expected).max() < 1e-4 * size
    np.testing.assert_allclose(
        new.kernel.dequantize(), whole, rtol=1e-4, atol=1e-4 * np.abs(whole).max()
    )
    merged = merge_lora(new)
    np.testing.assert_allclose(
        merged.kernel, whole, rtol=1e-4, atol=1e-4 * np.abs(whole).max()
    )
    packed = merge_lora(new, "int8").kernel
    assert packed.axis == axis

    # Gradients are those of the dense product.
    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(thin, rest, x):
        return jnp.sum(jnp.sin(eqx.combine(thin, rest)(x)))

    found = gradient(*eqx.partition(new, spec), x)
    assert found.kernel.a.shape == w.a.shape
    assert jnp.max(jnp.abs(found.kernel.b)) > 0

    # A file keeps them.
    eqq.save(tmp_path / "a", lora_only(new))
    again, _ = with_lora(q, eqq.load(tmp_path / "a"))
    assert jtu.tree_structure(again) == jtu.tree_structure(new)
    np.testing.assert_array_equal(run(again, x), run(new, x))


@pytest.mark.parametrize("name", ("heads", "out", "experts"))
def test_gradients(name):
    _, q, x, matrix = made(name)
    adapted, _ = lora(q, 4, min_size=0, key=jr.key(1))
    w = trained(adapted).kernel
    model = lambda a, b: eqx.tree_at(
        lambda m: (m.kernel.a, m.kernel.b), adapted, (a, b)
    )
    f = lambda a, b: jnp.sum(jnp.sin(model(a, b)(x)))

    def g(a, b):
        rows = w.scale * b @ a
        dense = jnp.asarray(q.kernel.dequantize()) + w.matrix.from_rows(rows)
        return jnp.sum(jnp.sin(jnp.einsum(products[name][0], x, dense)))

    for found, expected in zip(
        jax.jit(jax.grad(f, (0, 1)))(w.a, w.b), jax.jit(jax.grad(g, (0, 1)))(w.a, w.b)
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-2)


def test_products_stay_packed(monkeypatch):
    _, q, x, _ = made("heads")
    adapted, _ = lora(q, 4, key=jr.key(1))
    monkeypatch.setenv("EQQUANT_ON_DEQUANTIZE", "raise")
    text = str(jax.make_jaxpr(lambda x: adapted(x))(x))
    assert "dequantize" not in text and "f32[64,8,32]" not in text


def test_tree_compute_of_an_example():
    model, _, x, _ = made("heads")
    low = tree_compute(model, example=x)
    adapted, _ = lora(low, 4, key=jr.key(1))
    assert adapted.kernel.a.shape == (4, 64)
    np.testing.assert_allclose(adapted(x), low(x), rtol=1e-5, atol=1e-5)


def test_dense_arrays_with_more_axes():
    model, _, x, _ = made("heads")
    with pytest.raises(ValueError, match="none:\n- `kernel`: Product is not a known"):
        lora(model, 4, key=jr.key(1))
    rules = eqq.Rules([("kernel", True)])
    with pytest.warns(UserWarning, match="`kernel`.* along axis -1 .*is a guess"):
        lora(model, 4, rules, key=jr.key(1))
    with pytest.raises(ValueError, match="none: there are no matrices"):
        lora({"b": normal(2000)}, 4, key=jr.key(1))

    class Registered(Product):
        pass

    eqq.register_owner(Registered, "kernel", -3)
    adapted, _ = lora(Registered(model.kernel, model.equation), 4, key=jr.key(1))
    assert adapted.kernel.a.shape == (4, 64)
    assert adapted.kernel.b.shape == (256, 4)


def test_what_cannot_be_adapted():
    apart = eqq.quantize(normal(16, 8, 32), "int8", axis=(-3, -1))
    tree = {"apart": apart, "w": normal(64, 64)}
    with pytest.warns(UserWarning, match="No adapters for `apart`: its products"):
        adapted, _ = lora(tree, 4, key=jr.key(1))
    assert adapted["apart"] is apart and isinstance(adapted["w"], LoRA)
    for spec in (eqq.Rules([("apart", True)]), {"apart": True, "w": None}):
        with pytest.raises(ValueError, match="Got `apart`, of shape"):
            lora(tree, 4, spec, key=jr.key(1))
