import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq

from .helpers import error, formats, main_formats, native_formats, normal


platforms = pytest.mark.parametrize("platform", ("tpu", "gpu"))


def same(a, b):
    return all(map(np.array_equal, *map(jtu.tree_leaves, (a.stored, b.stored))))


# What is quantized lies as a CPU would have it.
def from_cpu(q):
    return eqq.tree_prepack(q, platform="cpu")


@pytest.mark.examples(2)
@native_formats
@platforms
def test_lossless(format, platform):
    q = from_cpu(eqq.quantize(normal(2, 67, 45), format))
    p = eqq.tree_prepack(q, platform=platform)
    assert (p.shape, p.dtype, p.axis) == (q.shape, q.dtype, q.axis)
    assert np.array_equal(p.dequantize(), q.dequantize())
    back = from_cpu(p)
    assert back.format == q.format and same(back, q)


@jax.jit
def product_and_gradient(x, w):
    return x @ w, jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x)


@pytest.mark.examples(1)
@main_formats
@platforms
def test_products(format, platform):
    q = eqq.tree_prepack(eqq.quantize(normal(130, 48), format), platform=platform)
    w = q.dequantize()
    for x, q, w in ((normal(5, 130), q, w), (normal(5, 48), q.T, w.T)):
        y, gradient = product_and_gradient(x, q)
        assert error(y, x, w) < 1e-4
        _, expected = product_and_gradient(x, w)
        np.testing.assert_allclose(gradient, expected, rtol=1e-2, atol=1e-3)


def test_layouts():
    q = eqq.quantize(normal(130, 48), eqq.Ternary())
    assert q.stored["codes"].shape == (26, 48)
    gpu = eqq.tree_prepack(q, platform="cuda")
    assert gpu.stored["codes"].shape == (48, 33)
    assert gpu.format == eqq.Ternary(radix=4)
    tpu = eqq.tree_prepack(gpu, platform="tpu")
    assert tpu.stored["codes"].shape == (33, 48)
    nested = eqq.quantize(normal(64, 4), eqq.Nested(eqq.Ternary(16)))
    assert eqq.tree_prepack(nested, platform="tpu").format.base.radix == 4
    rotated = eqq.quantize(normal(64, 4), eqq.Rotated(eqq.Ternary(), 32, 1))
    tpu = eqq.tree_prepack(rotated, platform="tpu")
    assert tpu.format == eqq.Rotated(eqq.Ternary(radix=4), 32, 1)
    np.testing.assert_array_equal(tpu.dequantize(), rotated.dequantize())


def test_nothing_to_do():
    q = eqq.quantize(normal(64, 48), "nf4")
    assert eqq.tree_prepack(q, platform="cpu") is q
    assert eqq.tree_prepack(q) is q
    v = eqq.quantize(normal(64), "nf4")
    assert eqq.tree_prepack(v, platform="gpu") is v


@pytest.mark.examples(1)
@platforms
def test_model(platform):
    model = eqx.nn.MLP(32, 32, 64, depth=2, key=jr.key(0))
    shared = eqq.quantize(normal(64, 64), "ternary")
    tree = {"model": eqq.tree_quantize(model, "ternary"), "a": shared, "b": shared}
    packed = eqq.tree_prepack(tree, platform=platform)
    assert packed["a"] is packed["b"]
    x = normal(4, 32)
    y = jax.vmap(packed["model"])(x)
    np.testing.assert_allclose(y, jax.vmap(tree["model"])(x), rtol=1e-4, atol=1e-5)
    stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, key=key))(
        jr.split(jr.key(1), 3)
    )
    stacked = eqq.tree_prepack(eqq.tree_quantize(stacked), platform=platform)
    ys = eqx.filter_vmap(lambda layer, x: jax.vmap(layer)(x), in_axes=(0, None))(
        stacked, x
    )
    assert ys.shape == (3, 4, 32)


@pytest.mark.examples(3)
@pytest.mark.parametrize("name", sorted(formats))
@platforms
def test_files_are_canonical(name, platform, tmp_path):
    q = eqq.quantize(normal(66, 48), formats[name])
    p = eqq.tree_prepack(q, platform=platform)
    eqq.save(tmp_path / "p.safetensors", p)
    back = eqq.load(tmp_path / "p.safetensors")
    assert back.format == from_cpu(q).format and same(back, from_cpu(q))
    like = eqq.load(tmp_path / "p.safetensors", like=p)
    assert like.layout == p.layout
    assert same(like, p)


def test_errors():
    with pytest.raises(ValueError, match="`platform` should be one of .* Got 'npu'"):
        eqq.tree_prepack({}, platform="npu")
    with pytest.raises(ValueError, match="`radix` should be 3 or 4. Got 2"):
        eqq.Ternary(radix=2)
