import dataclasses
import functools as ft

import jax.numpy as jnp

import eqquant as eqq
from eqquant.kernels._adapted import on_base
from eqquant.kernels.gpu.ptx import _product

from ...helpers import normal


# One of each way to read codes, scales and blocks.
kinds = {
    "int4": eqq.Int4(64),
    "int4-128": eqq.Int4(128),
    "int4-32-float16": eqq.Int4(32, scale_dtype=jnp.float16),
    "int4-channel": eqq.Int4(None),
    "int-4": eqq.Int(4, 256),
    "int-2": eqq.Int(2, 64, scale_dtype=jnp.bfloat16),
    "ternary": eqq.Ternary(scale="tensor"),
    "nf4": eqq.NF4(64),
    "nf4-channel": eqq.NF4(None),
    "fp4": eqq.FP4(32),
    "int4-affine": eqq.Int4(64, symmetric=False),
    "int4-affine-channel": eqq.Int4(None, symmetric=False),
    "gptq": eqq.Int(4, 128, "zero_point", scale_dtype=jnp.float16),
    "mlx": eqq.Int(4, 64, "minimum", scale_dtype=jnp.bfloat16),
    "int-2-minimum": eqq.Int(2, 64, "minimum"),
    "int-8-zero-point": eqq.Int(8, 128, "zero_point"),
    "int-8-minimum": eqq.Int(8, 64, "minimum"),
    "int-8-channel": eqq.Int(8, None),
    "q4_0": eqq.formats.Q4_0(),
    "iq4_nl": eqq.formats.IQ4_NL(),
    "q8_0": eqq.formats.Q8_0(),
    "binary": eqq.Binary(),
    "binary-128": eqq.Binary(128),
    "fp8": eqq.FP8(),
    "fp8-64": eqq.FP8(block_size=64),
    "int8": eqq.Int8(),
    "int8-32": eqq.Int8(32),
    "int8-1024": eqq.Int8(1024),
    "mxfp4": eqq.MXFP4(),
    "mxfp8": eqq.MXFP8(),
    # Blocks of less than a step.
    "nvfp4": eqq.NVFP4(),
    "nvfp4-inverse": eqq.NVFP4(inverse=True),
    "int4-16": eqq.Int4(16, scale_dtype=jnp.bfloat16),
    "int4-16-zero-point": eqq.Int(4, 16, "zero_point"),
    "int2-32": eqq.Int(2, 32),
    "int8-16": eqq.Int8(16),
    "nf4-16": eqq.NF4(16),
    # Streams of bits.
    "int-3": eqq.Int(3, 64),
    "int-3-minimum": eqq.Int(3, 128, "minimum", scale_dtype=jnp.bfloat16),
    "int-3-16": eqq.Int(3, 16),
    "int-3-channel": eqq.Int(3, None),
    "int-5": eqq.Int(5, 64, "zero_point"),
    "int-6": eqq.Int(6, 32, "minimum"),
    "int-6-64": eqq.Int(6, 64),
    "int-6-128": eqq.Int(6, 128, "zero_point"),
    "int-7": eqq.Int(7, 256),
    # Blocks of files.
    "q4_1": eqq.formats.Q4_1(),
    "iq4_xs": eqq.formats.IQ4_XS(),
    "q2_k": eqq.formats.Q2_K(),
    "q3_k": eqq.formats.Q3_K(),
    "q4_k": eqq.formats.Q4_K(),
    "q5_k": eqq.formats.Q5_K(),
    "q6_k": eqq.formats.Q6_K(),
}
# Those whose numbers bfloat16 does not hold.
rounded = ("nf4", "nf4-channel", "int4-16", "int4-16-zero-point", "int2-32", "int8-16")
rounded += ("nf4-16", "int-3-16")
# Those that are timed on a GPU.
timed = ("int4", "nf4", "int8", "int8-32", "gptq", "mlx", "fp8", "binary-128")
timed += ("nvfp4", "mxfp4", "q4_k", "q6_k")


@ft.cache
def weight(k, n, format, seed=0):
    """`W[k, n]`, stored with the contracted axis last."""
    q = eqq.quantize(normal(n, k, seed=seed), format, axis=-1)
    return eqq.tree_prepack(q, platform="gpu").mT


def kernel_of(format):
    """The kernel that multiplies by a format."""
    composite = isinstance(format, eqq.formats.AbstractComposite)
    if not composite or isinstance(format, eqq.formats.AbstractGGUFBlocks):
        return _product.bfloat16_mma
    return on_base(_product.bfloat16_mma)


def problem_of(x, q, dtype=None):
    """That of a product on an NVIDIA GPU, on request with a result of another dtype."""
    problem = eqq.explain(x, q).problem
    assert problem is not None
    dtype = problem.dtype if dtype is None else jnp.dtype(dtype)
    return dataclasses.replace(problem, platform="cuda", dtype=dtype)
