"""Compiles products of a few rows for GPUs since Ampere, on a machine without one, and
prints a line of JSON for each:

    python -m tests.aot.compile_mma
"""

import json
import os
import pathlib
import re


if __name__ == "__main__":
    # Before JAX is imported.
    os.environ |= {"JAX_PLATFORMS": "cpu"}

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqquant as eqq


gpus = ("a100", "rtx4090", "h200", "b200", "rtx5090")
formats = {
    "int4": eqq.Int4(64),
    "nf4": eqq.NF4(64),
    "int8": eqq.Int8(),
    "int8-32": eqq.Int8(32),
    "gptq": eqq.Int(4, 128, "zero_point", scale_dtype=jnp.float16),
    "mlx": eqq.Int(4, 64, "minimum", scale_dtype=jnp.bfloat16),
    "fp8": eqq.FP8(),
    "binary": eqq.Binary(),
    "mxfp4": eqq.MXFP4(),
    "nvfp4": eqq.NVFP4(),
    "q4_k": eqq.formats.Q4_K(),
    "q5_0": eqq.formats.Q5_0(),
    "q6_k": eqq.formats.Q6_K(),
}
# The stack of three weights, and one.
cases = [
    ("a100", name, m, 1) for name in formats if name != "q5_0" for m in (1, 16, 64)
]
cases += [(gpu, name, 1, 1) for gpu in gpus[1:] for name in ("int4", "nvfp4", "q4_k")]
cases += [("a100", "nf4", 4, 3), ("a100", "nvfp4", 4, 3), ("a100", "int4", 256, 1)]
size = 4096
# Of many numbers, stored with the contracted axis first, or to be unpacked.
copied = [
    (gpu, name, first)
    for gpu in ("a100", "h200")
    for name in ("nf4", "int8", "q5_0")
    for first in (False, True)
    if first or name == "q5_0"
]
large = (8192, 16384)


def main():
    for gpu in gpus:
        target = pathlib.Path(__file__).with_name(f"{gpu}.txtpb").read_text()
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology="1x1x1"
        )
        mesh = Mesh(np.array(topology.devices), ("x",))
        for case in cases:
            at, name, m, stack = case
            if at == gpu:
                # (What is chosen on Hopper is another kernel.)
                q = _weight(name, stack)
                found = _compile(q, m, stack, mesh, "bfloat16_mma")
                print(json.dumps({"case": case} | found), flush=True)
        for case in copied:
            at, name, first = case
            if at == gpu:
                found = _compile(_weight(name, 1, first, large), 16, 1, mesh)
                print(json.dumps({"case": case} | found), flush=True)


def _weight(name, stack, first=False, shape=(size, size)):
    shape = shape if stack == 1 else (stack, *shape)

    def quantized():
        q = eqq.quantize(jnp.zeros(shape), formats[name])
        return q if first else eqq.tree_prepack(q, platform="gpu")

    return eqx.filter_eval_shape(quantized)


def _compile(q, m, stack, mesh, kernel=None):
    lead = () if stack == 1 else (stack,)
    x = jax.ShapeDtypeStruct((*lead, m, q.shape[-2]), jnp.bfloat16)
    sharding = NamedSharding(mesh, PartitionSpec())
    x, q = jtu.tree_map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), (x, q)
    )
    product = jax.jit(lambda x, q: eqq.qmatmul(x, q, kernel=kernel))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = product.trace(x, q).lower().compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    entry = text[text.index("\nENTRY") :]
    return {
        "temporary_bytes": memory.temp_size_in_bytes,
        "calls": entry.count('custom_call_target="__gpu$xla.gpu.ptx"'),
        "fusions": len(re.findall(r" (?:fusion|copy|transpose)\(", entry)),
    }


if __name__ == "__main__":
    main()
