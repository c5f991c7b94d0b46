"""Compiles products for GPUs by XLA alone, on a machine without one, and prints a line
of JSON for each:

    python -m tests.aot.compile_fused [FORMAT]
"""

import dataclasses
import json
import os
import pathlib
import re
import sys


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


targets = ("a100", "rtx4090", "h200", "b200", "rtx5090")
size = 4096
# Along the blocks and across them, with the contracted axis first in memory or last.
layouts = [(first, across) for first in (False, True) for across in (False, True)]


def _each(targets, names, rows):
    return [
        (target, name, m, *layout)
        for target in targets
        for name in names
        for m in rows
        for layout in layouts
    ]


# A target, a format, the number of rows, and the layout. (Some formats have more than
# four codes in a byte, or codes in two bytes.)
sample = _each(targets[:1], kinds_of_formats, (1, 8))
sample += _each(targets[:1], ("nf4", "q4_k", "trellis"), (64,))
sample += _each(targets[1:], ("nf4",), (1, 8, 64)) + _each(targets[1:], ("q4_k",), (1,))
sample += _each(("h200",), ("binary-128", "ternary", "int-3-minimum", "nvfp4"), (1,))
sample += _each(("h200",), ("q5_0", "q5_k"), (1, 8))
sample += _each(("rtx4090",), ("iq4_xs",), (8,))
sample += _each(("b200",), ("int-7-zero-point",), (1,))
sample += _each(("b200",), ("int8-32",), (8,))


def of_format(name):
    """All cases of a format. (From nine rows on, all is decoded in the same way.)"""
    first, *others = targets
    return _each((first,), (name,), (1, 2, 4, 8, 64)) + _each(others, (name,), (1, 8))


def main(cases):
    meshes = {target: _mesh(target) for target in targets}
    for target, name, m, first, across in cases:
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
    main([case for name in sys.argv[1:] for case in of_format(name)] or sample)
