from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._array import AbstractStandIn
from .._product import full_spec, placed
from ._owners import leaves_with_info
from ._rules import Rules


def tree_shard(
    model: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh | None = None
) -> PyTree:
    """Places the arrays of a model on the devices of a mesh: those of a quantized one
    together, as the array would be that they stand for.

    !!! Example

        ```python
        mesh = jax.make_mesh((2, 4), ("data", "model"))
        rules = eqquant.Rules([
            ("*.up.weight", P("model", None)),
            ("*.down.weight", P(None, "model")),
            ("*", P()),
        ])
        model = eqquant.tree_shard(model, rules, mesh)
        ```

    **Arguments:**

    - `model`: any PyTree. Its arrays may be `jax.ShapeDtypeStruct`s, which then say how
        they are to be placed.
    - `specs`: which axis of each array is split over which axes of the mesh. Either

        - a PyTree that is a prefix of `model`, whose leaves are each a `PartitionSpec`,
          a `NamedSharding`, or `None` to leave what is there as it is. A spec is of an
          array as its shape says, quantized or not; of a weight that is adapted, as by
          [`eqquant.train.lora`][], or trained to be quantized, it is of that weight.
        - [`eqquant.Rules`][] from paths to these. The first that matches decides, and
          an array that none does is left as it is.

    - `mesh`: that `PartitionSpec`s are of. By default the one that `jax.set_mesh` set.

    **Returns:**

    `model`, with its arrays placed. Each quantized array declares how, as its
    `sharding`.

    **Raises:**

    A `ValueError` where there is no mesh, and for a spec that an array has not enough
    axes for, or that would split a byte or a block: it names the array, and the nearest
    specs that would do.
    """
    if isinstance(specs, Rules):
        wishes = _wishes_of_rules(specs, model)
    else:
        wishes = _wishes_of_prefix(specs, model)
    leaves, treedef = jtu.tree_flatten_with_path(model, is_leaf=_is_weight)
    # An array in two places stays one.
    done = {}

    def shard(keys, leaf, spec):
        if spec is None or not (_is_weight(leaf) or _is_array(leaf)):
            return leaf
        path = jtu.keystr(keys, simple=True, separator=".")
        if (id(leaf), spec) not in done:
            try:
                done[id(leaf), spec] = _shard(leaf, _named(spec, mesh, leaf))
            except ValueError as e:
                raise ValueError(f"Could not shard `{path}`: {e}") from e
        return done[id(leaf), spec]

    new = [shard(*leaf, spec) for leaf, spec in zip(leaves, wishes, strict=True)]
    return treedef.unflatten(new)


def _wishes_of_rules(rules, model):
    def wish(info):
        index = None if info is None else rules.match(info)
        return None if index is None else _checked(rules.rules[index][1])

    return [
        wish(info)
        for _, info in leaves_with_info(model, lambda x: _is_weight(x) or _is_array(x))
    ]


def _wishes_of_prefix(specs, model):
    wishes = []

    def extend(spec, subtree):
        leaves = jtu.tree_leaves(subtree, is_leaf=_is_weight)
        wishes.extend([_checked(spec)] * len(leaves))

    is_leaf = lambda x: x is None or isinstance(x, PartitionSpec)
    jtu.tree_map(extend, specs, model, is_leaf=is_leaf)
    return wishes


def _checked(spec):
    if spec is None or isinstance(spec, PartitionSpec | NamedSharding):
        return spec
    raise TypeError(
        "Of `specs`, each should be a `PartitionSpec`, a `NamedSharding` or None. Got "
        f"{spec!r}."
    )


def _named(spec, mesh, leaf):
    if isinstance(spec, NamedSharding):
        return spec
    if mesh is None:
        traced = any(isinstance(a, Tracer) for a in jtu.tree_leaves(leaf))
        get = jax.sharding.get_abstract_mesh if traced else jax.sharding.get_mesh
        mesh = get()
    if mesh.empty:
        raise ValueError(
            "`mesh` should be given, or be set by `jax.set_mesh`, for a "
            f"`PartitionSpec`. Got {spec}."
        )
    return NamedSharding(mesh, spec)


def _shard(leaf, sharding):
    if _is_weight(leaf):
        return leaf.with_sharding(sharding)
    spec = full_spec(sharding.spec, len(leaf.shape))
    return placed(leaf, NamedSharding(sharding.mesh, spec))


def _is_weight(x: Any) -> bool:
    return isinstance(x, AbstractStandIn)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
