import collections
import re
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh(kind, *shape):
    """Of eight devices: with the axis "a", or "a" and "b"."""
    names = ("a", "b")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kinds[kind],) * len(shape))


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def shard(q, mesh, *spec):
    return q.with_sharding(NamedSharding(mesh, P(*spec)))


_operation = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


def collectives(fn: Any, *args: Any) -> dict[str, list[str]]:
    """What a compiled function sends between devices: by the name of the operation, the
    dtypes and shapes."""
    return run(fn, *args)[1]


def run(fn: Any, *args: Any) -> tuple[Any, dict[str, list[str]]]:
    """What a compiled function returns, and what it sends between devices."""
    arrays, static = eqx.partition(args, eqx.is_array)
    jitted = jax.jit(lambda arrays: fn(*eqx.combine(arrays, static)))
    compiled = jitted.lower(arrays).compile()
    found = collections.defaultdict(list)
    for line in compiled.as_text().splitlines():
        match = _operation.search(line)
        if match is not None:
            shapes, name = match.groups()
            found[name] += re.findall(r"\w+\[[\d,]*\]", shapes)
    return compiled(arrays), dict(found)
