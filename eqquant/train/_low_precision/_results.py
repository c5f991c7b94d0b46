from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from ..._product import full_spec, names_of
from ._dots import Kind


def result(kind: Kind, stack: int, x: tuple, operand: tuple) -> tuple:
    """Returns one entry for each axis of the result of a product, from the entries of
    its arguments: sizes, or entries of specs."""
    if kind == "spread":
        return (*operand[:-1], x[-2])
    if kind == "outer":
        return (*operand[:stack], x[-1], operand[-1])
    return (*x[:-1], operand[-2 if kind == "along" else -1])


def result_sharding(kind: Kind, stack: int, x: Any, codes: Any) -> NamedSharding | None:
    """Returns the sharding of the result of a product, if the types of its arguments
    `x` and `codes` carry shardings: each remaining axis keeps its sharding, unless
    another axis takes the same mesh axes."""
    sharding = x.sharding
    if not sharding.mesh.explicit_axes:
        return None
    specs = [tuple(full_spec(a.sharding.spec, a.ndim)) for a in (x, codes)]
    taken, entries = set(), []
    for entry in result(kind, stack, *specs):
        names = set(names_of(entry))
        entries.append(None if taken & names else entry)
        taken |= names
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))
