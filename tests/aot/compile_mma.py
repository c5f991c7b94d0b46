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
    "q6_k": eqq.formats.Q6_K(),
}
# The stack of three weights, and one.
cases = [("a100", name, m, 1) for name in formats for m in (1, 16, 64)]
cases += [(gpu, name, 1, 1) for gpu in gpus[1:] for name in ("int4", "nvfp4", "q4_k")]
cases += [("a100", "nf4", 4, 3), ("a100", "nvfp4", 4, 3), ("a100", "int4", 256, 1)]
size = 4096


def main():
    for gpu in gpus:
        target = pathlib.Path(__file__).with_name(f"{gpu}.txtpb").read_text()
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology="1x1x1"
        )
        mesh = Mesh(np.array(topology.devices), ("x",))
        for case in cases:
            if case[0] == gpu:
                print(
                    json.dumps({"case": case} | _compile(*case[1:], mesh)), flush=True
                )


def _compile(name, m, stack, mesh):
    lead = () if stack == 1 else (stack,)
    q = eqx.filter_eval_shape(
        lambda: eqq.tree_prepack(
            eqq.quantize(jnp.zeros((*lead, size, size)), formats[name]), platform="gpu"
        )
    )
    x = jax.ShapeDtypeStruct((*lead, m, size), jnp.bfloat16)
    sharding = NamedSharding(mesh, PartitionSpec())
    x, q = jtu.tree_map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), (x, q)
    )
    # (Not what is chosen on Hopper.)
    product = jax.jit(lambda x, q: eqq.qmatmul(x, q, kernel="bfloat16_mma"))
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
