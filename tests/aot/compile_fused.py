"""Compiles products for GPUs by XLA alone, on a machine without one, and prints a line
of JSON for each:

    python -m tests.aot.compile_fused
"""

import dataclasses
import json
import os
import pathlib
import re


if __name__ == "__main__":
    # Before JAX is imported.
    os.environ |= {"JAX_PLATFORMS": "cpu", "EQQUANT_PTX": "0"}

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqquant as eqq
import eqquant.kernels._table as table

from ..helpers import formats, kinds_of_formats


def is_fused(format):
    format = format.format if isinstance(format, eqq.Rotated) else format
    return not isinstance(format, eqq.Trellis) and format != formats["bnb-double"]


# The first is for all formats.
targets = ("a100", "rtx4090", "h200", "b200", "rtx5090")
# Along the blocks and across them, with the contracted axis first in memory or last.
_main = ("nf4", "int8", "int4-affine", "mxfp4", "nested")
_all = [(first, across) for first in (False, True) for across in (False, True)]
names = [name for name, format in formats.items() if is_fused(format)]
_cases = [(name, 1, first, False) for name in names for first in (False, True)]
_cases += [(name, 1, False, True) for name in kinds_of_formats if name in names]
_cases += [(name, m, *layout) for name in _main for m in (4, 8) for layout in _all]
_cases += [(name, 1, *layout) for name in ("q4_k", "q6_k") for layout in _all[1::2]]
cases = [(targets[0], *case) for case in dict.fromkeys(_cases)]
cases += [
    (target, name, 1, *layout)
    for target in targets[1:]
    for name in ("nf4", "int8", "mxfp4", "q4_k")
    for layout in _all
    # (For the others, there are better kernels on Hopper.)
    if (target, layout) != ("h200", (False, False)) or name == "q4_k"
]
# (With more than four codes in a byte.)
cases += [("h200", name, 1, True, False) for name in ("binary", "ternary")]
# Of many rows, parts of the weight are decoded; and of few, where nothing is better.
many = [
    (target, name, 64, *layout)
    for target in targets
    for name in (("nf4", "q4_k", "fp8") if target == targets[0] else ("nf4",))
    for layout in _all
    # (Nor here.)
    if target != "h200" or layout[1]
]
many += [(targets[0], "bnb-double", 1, *layout) for layout in _all]
size = 4096


def main():
    meshes = {target: _mesh(target) for target in targets}
    for target, name, m, first, across in cases + many:
        q = eqx.filter_eval_shape(lambda: _weight(formats[name], first))  # noqa: B023
        q = q.T if across else q
        x = jax.ShapeDtypeStruct((m, size), jnp.bfloat16)
        print(json.dumps(_compile(x, q, meshes[target])), flush=True)


def _mesh(target):
    target = pathlib.Path(__file__).with_name(f"{target}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x1"
    )
    return Mesh(np.array(topology.devices), ("x",))


def _weight(format, first):
    q = eqq.quantize(jnp.zeros((size, size)), format)
    return q if first else eqq.tree_prepack(q, platform="gpu")


def _compile(x, q, mesh):
    problem = eqq.explain(x, q).problem
    assert problem is not None
    problem = dataclasses.replace(problem, platform="cuda")
    sharding = NamedSharding(mesh, PartitionSpec())
    x, q = jtu.tree_map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), (x, q)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        kernel = table.choose(problem).kernel
        compiled = jax.jit(lambda x, q: x @ q).trace(x, q).lower().compile()
    memory, fusions = compiled.memory_analysis(), _fusions(compiled.as_text())
    assert memory is not None
    stored = [name for name, _ in fusions["parameters"] if "stored" in name]
    return {
        "kernel": kernel.name,
        "temporary_bytes": memory.temp_size_in_bytes,
        "stored_bytes": q.nbytes,
        "fusions": len(fusions["reads"]),
        "reads": {
            name: sum(name in read for read in fusions["reads"]) for name in stored
        },
    }


def _fusions(text):
    """The parameters of a program, and what each of its fusions reads."""
    entry = text[text.index("\nENTRY") :]
    parameters = re.findall(r"%(\S+) = (\S+) parameter\(", entry)
    reads = [
        re.findall(r"%([\w.\-]+)", operands)
        for operands in re.findall(r" (?:fusion|copy|transpose)\((.*?)\)", entry)
    ]
    return {"parameters": parameters, "reads": reads}


if __name__ == "__main__":
    main()
