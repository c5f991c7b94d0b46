import equinox as eqx
import jax
import jax.export
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq


# One program for a CPU, a TPU and a GPU: with the kernels for one of the latter two, by
# how the codes lie, and right on all.
@pytest.mark.examples(1)
@pytest.mark.parametrize("platform, kernel", (("tpu", "tpu_custom_call"), ("gpu", "")))
def test_all_platforms(platform, kernel):
    if platform == "gpu" and jax.__version_info__ >= (0, 11, 2):
        kernel = "mosaic_gpu"
    model = eqx.nn.MLP(256, 256, 512, depth=1, key=jr.key(0))
    model = eqq.tree_prepack(eqq.tree_quantize(model, "int4"), platform=platform)
    fn = jax.jit(lambda x: jax.vmap(model)(x))
    x = jr.normal(jr.key(1), (16, 256))
    exported = jax.export.export(fn, platforms=("cpu", "tpu", "cuda"))(x)
    assert kernel in exported.mlir_module()
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.platforms == ("cpu", "tpu", "cuda")
    y, expected = loaded.call(x), fn(x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


# Weights that were not prepacked are for all GPUs.
def test_no_kernel_for_one_kind_of_gpu():
    q = eqq.quantize(jr.normal(jr.key(0), (256, 64)), "int4")
    product = jax.jit(lambda x, q: x @ q)
    exported = jax.export.export(product, platforms=("cuda",))(
        jr.normal(jr.key(1), (2, 256)), q
    )
    assert "mosaic_gpu" not in exported.mlir_module()
