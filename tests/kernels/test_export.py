import subprocess
import sys

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


# Whichever was written first, and whatever JAX has compiled of the function.
@pytest.mark.examples(1)
@pytest.mark.parametrize("format", ["nf4", "int8", "q4_k", "ternary", "int8 x int8"])
def test_for_servers(format):
    w, x = jr.normal(jr.key(0), (512, 64)), jr.normal(jr.key(1), (2, 512))
    activation = eqq.Int8() if format == "int8 x int8" else None
    q = eqq.quantize(w, format.split()[0], activation=activation)
    product = jax.jit(lambda x, q: x @ q)
    kernel, elsewhere = eqq.explain(x, q).kernel, eqq.explain(x, q).exported
    assert kernel is not None and elsewhere is not None
    assert "native" not in elsewhere
    for export, name in [(eqq.export, kernel), (jax.export.export, elsewhere)] * 2:
        exported = export(product)(x, q)
        calls = "@eqquant_" in exported.mlir_module()
        assert calls == ("native" in name)
        loaded = jax.export.deserialize(exported.serialize())
        expected = eqq.qmatmul(x, q, kernel=name)
        bound = 2e-5 * (abs(x) @ abs(q.dequantize()))
        assert bool((abs(loaded.call(x, q) - expected) <= bound).all())


def test_other_checks_of_exports_stay():
    x = jr.normal(jr.key(0), (2,))
    fn = jax.jit(jax.ffi.ffi_call("of_another_library", x))
    with pytest.raises(ValueError, match="of_another_library"):
        eqq.export(fn)(x)


_server = """
import sys, numpy as np, jax, eqquant
x, w = np.load(sys.argv[2])["x"], np.load(sys.argv[2])["w"]
with open(sys.argv[1], "rb") as f:
    exported = jax.export.deserialize(bytearray(f.read()))
np.testing.assert_allclose(exported.call(x), x @ w, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.processes
def test_server(tmp_path):
    q = eqq.quantize(jr.normal(jr.key(0), (256, 64)), "int8")
    x = jr.normal(jr.key(1), (2, 256))
    program, data = tmp_path / "program", tmp_path / "data.npz"
    exported = eqq.export(jax.jit(lambda x: x @ q))(x)
    program.write_bytes(exported.serialize())
    np.savez(data, x=x, w=q.dequantize())
    subprocess.run([sys.executable, "-c", _server, program, data], check=True)
