"""Compiles products with quantized weights for an H200, on a machine without one, and
prints what came out as JSON. A program of its own, since it needs its own environment:

    python -m tests.aot.compile_cuda FOLDER
"""

import json
import os
import pathlib
import re
import sys


if __name__ == "__main__":
    # Before JAX is imported. Mosaic writes to the folder what it compiles.
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_TO": sys.argv[1],
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqquant as eqq


formats = {
    "nf4": (eqq.NF4(64), None),
    "nf4-32": (eqq.NF4(32), None),
    "int4": (eqq.Int4(64), None),
    "int4-affine": (eqq.Int4(64, symmetric=False), None),
    "int8": (eqq.Int8(), None),
    "int8-128": (eqq.Int8(128), None),
    "ternary": (eqq.Ternary(), None),
    "ternary-128": (eqq.Ternary(128), None),
    "int8-int8": (eqq.Int8(), eqq.Int8()),
    "int4-minimum": (eqq.Int(4, 64, "minimum"), None),
    "int8-zero-point": (eqq.Int(8, 128, "zero_point"), None),
    "int3": (eqq.Int(3, 32, "minimum"), None),
    "fp8": (eqq.FP8(), None),
    "mxfp4": (eqq.MXFP4(), None),
    "nvfp4": (eqq.NVFP4(), None),
}
others = ("int4-minimum", "int8-zero-point", "int3", "fp8", "mxfp4", "nvfp4")
# Their codes, or their scales, are computed before the kernel runs.
unpacked = ("int3", "mxfp4", "nvfp4")
# Rows, channels, and the size of the contracted axis. Also what fills no piece.
sizes = ((1, 4096, 4096), (16, 4096, 4096), (256, 4096, 4096), (13, 86, 1152))
# In the tiles for many rows.
large = (300, 14336, 1024)
cases = [(name, *size) for name in formats if name not in others for size in sizes]
cases += [(name, *sizes[0]) for name in others]
cases += [(name, *large) for name in ("nf4", "int8", *others)]
# As many channels as a warpgroup stores.
cases += [("nf4", 2, 64, 512), ("int8-int8", 2, 128, 512)]


def main(folder: pathlib.Path) -> dict[str, dict]:
    target = pathlib.Path(__file__).with_name("h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ("x",))
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, m, n, k in cases:
        q = jax.eval_shape(lambda: _weight(n, k, *formats[name]))
        x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
        # (That of few rows of unpacked codes would be XLA's alone.)
        kernel = "bfloat16_wgmma" if name in others else None
        found[f"{name}-{m}"] = _compile(x, q, kernel, mesh, folder)
    return found


def _weight(n, k, format, activation):
    q = eqq.quantize(jnp.zeros((k, n)), format, activation=activation)
    return eqq.tree_prepack(q, platform="gpu")


def _compile(x, q, kernel, mesh, folder):
    sharding = NamedSharding(mesh, PartitionSpec())
    x, q = jtu.tree_map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), (x, q)
    )
    before = set(folder.iterdir())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        product = jax.jit(lambda x, q: eqq.qmatmul(x, q, kernel=kernel))
        compiled = product.trace(x, q).lower().compile()
    new = {path.suffix: path.read_text() for path in set(folder.iterdir()) - before}
    ptx, ptxas = new[".ptx"], new[".ptxas"]
    number = lambda pattern: int(re.search(pattern, ptxas)[1])  # pyright: ignore
    return {
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "stored_bytes": q.nbytes,
        "registers": number(r"Used (\d+) registers"),
        "spilled_bytes": number(r"(\d+) bytes spill stores")
        + number(r"(\d+) bytes spill loads"),
        "wgmma": sorted(set(re.findall(r"wgmma\.mma_async[\w.]*", ptx))),
        "operands_in_registers": bool(
            re.search(r"wgmma\.mma_async[\w.]* \{[^}]*\}, \{", ptx)
        ),
        "instructions": {
            name: len(re.findall(rf"\b{name}", ptx))
            for name in ("prmt", "cp.async.bulk.tensor", "cp.async.bulk.global")
        },
        "serialized": "C7510" in ptxas or "C7512" in ptxas,
    }


if __name__ == "__main__":
    print(json.dumps(main(pathlib.Path(sys.argv[1]))))
