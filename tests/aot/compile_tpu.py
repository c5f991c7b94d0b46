"""Compiles products with quantized weights for TPUs, on a machine without one, and
prints what came out, a line of JSON for each:

    python -m tests.aot.compile_tpu FOLDER
"""

import dataclasses
import json
import os
import pathlib
import re
import sys


if __name__ == "__main__":
    # Before JAX is imported. libtpu writes to the folder what it compiles.
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": (
            f"--xla_jf_dump_to={sys.argv[1]} --xla_jf_dump_llo_text=true"
        ),
    }

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
import eqquant.kernels._table as table


generations = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
formats = {
    "nf4": (eqq.NF4(64), None),
    "int4": (eqq.Int4(64), None),
    "int4-affine": (eqq.Int4(64, symmetric=False), None),
    "ternary": (eqq.Ternary(radix=4), None),
    "binary": (eqq.Binary(), None),
    "int8": (eqq.Int8(), None),
    "int8-64": (eqq.Int8(64), None),
    "int8-int8": (eqq.Int8(), eqq.Int8()),
}
cases = [
    (generation, name, product, m)
    for generation in generations
    for name, (_, activation) in formats.items()
    for product in ("matmul", "matmul_transposed")
    for m in (1, 16, 256)
    # (The derivative of rounded activations is that of the weight-only product.)
    if activation is None or product == "matmul"
]


def main(folder: pathlib.Path):
    folder.mkdir(parents=True, exist_ok=True)
    meshes = {generation: _mesh(generation, (1,), ("x",)) for generation in generations}
    for generation, name, product, m in cases:
        x, q, problem = _problem(name, product, m)
        kernel = table.choose(problem).kernel
        fn = lambda x, stored: kernel.fn(x, stored, problem)
        program = _compile(meshes[generation], fn, x, q.stored)
        _print(f"{generation} {name} {product} {m}", kernel.name, program, folder)
    _print("model", None, _model(), folder)
    for kind in (AxisType.Auto, AxisType.Explicit):
        _print(f"sharded {kind.name}", None, _sharded(kind), folder)


def _problem(name, product, m):
    format, activation = formats[name]
    n = k = 4096
    q = eqx.filter_eval_shape(
        lambda: eqq.quantize(jnp.zeros((k, n)), format, activation=activation)
    )
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    q_of_product = q if product == "matmul" else q.T
    problem = eqq.explain(x, q_of_product).problem
    return x, q, dataclasses.replace(problem, platform="tpu")


def _model():
    """A network whose rows are split over four chips."""
    mesh = _mesh("v5e", (4,), ("data",))
    key = jax.random.key(0)
    mlp = eqx.filter_eval_shape(
        lambda: eqq.tree_quantize(eqx.nn.MLP(512, 512, 1024, 2, key=key), "int4")
    )
    is_struct = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    arrays, static = eqx.partition(mlp, is_struct)
    rows = P("data")
    fn = jax.shard_map(
        lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x),
        mesh=mesh,
        in_specs=(P(), rows),
        out_specs=rows,
    )
    sharding = NamedSharding(mesh, rows)
    x = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16, sharding=sharding)
    return _compile(mesh, fn, arrays, x)


def _sharded(kind):
    """The derivative of two layers, of which each of two chips has a half of the
    weights, for half of the rows."""
    mesh = _mesh("v5e", (2, 2), ("data", "model"), kind)
    mlp = eqx.filter_eval_shape(
        lambda: eqq.tree_quantize(
            eqx.nn.MLP(512, 512, 2048, 1, key=jax.random.key(0)), "int4"
        )
    )
    rules = eqq.Rules(
        [
            ("layers.0.weight", P("model", None)),
            ("layers.0.bias", P("model")),
            ("layers.1.weight", P(None, "model")),
            ("*", P()),
        ]
    )
    is_struct = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    arrays, static = eqx.partition(eqq.tree_shard(mlp, rules, mesh), is_struct)

    def loss(x, arrays):
        y = jax.vmap(eqx.combine(arrays, static))(x)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    rows = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=rows)
    return _compile(mesh, jax.grad(loss), x, arrays)


def _mesh(generation, shape, axes, kind=AxisType.Auto):
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=generations[generation]
    )
    devices = np.array(topology.devices[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, axes, axis_types=(kind,) * len(axes))


def _compile(mesh, fn, *args):
    def placed(a):
        # On every device, if nothing else is said.
        sharding = a.sharding or NamedSharding(mesh, P())
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(fn).trace(*jtu.tree_map(placed, args))
        return traced.lower().compile()


def _print(case, kernel, program, folder):
    bundles, spills = _largest(folder)
    found = {
        "case": case,
        "kernel": kernel,
        "calls": program.as_text().count("tpu_custom_call"),
        "collectives": re.findall(
            r" = (.*?) (all-\w+)(?:-start)?\(", program.as_text()
        ),
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        "bundles": bundles,
        "spills": spills,
    }
    print(json.dumps(found), flush=True)


def _largest(folder):
    """The bundles and the spills of the largest kernel in the folder, which is emptied:
    each belongs to one program."""
    found = [(0, 0)]
    for file in folder.glob("*schedule-analysis_final_bundles.txt"):
        text = file.read_text()
        if "custom-call" in text:
            total = re.search(r"total scheduled bundles:\s+(\d+)", text)
            assert total is not None, file
            program = file.name.split("-schedule")[0].rsplit("-", 1)[0]
            found.append((int(total[1]), _spills(folder, program)))
    for file in folder.iterdir():
        file.unlink()
    return max(found)


def _spills(folder, program):
    pattern = f"{program}-*final_hlo-static-per-bundle-utilization.txt"
    (file,) = folder.glob(pattern)
    lines = file.read_text().splitlines()
    column = lines[1].replace(" ", "").split(",").index("VSTORE:SPILL")
    return sum(int(line.split()[column]) for line in lines[4:] if line.strip())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
