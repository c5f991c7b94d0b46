from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._array import AbstractArrayLike, once_per_array
from .._product import full_spec, placed
from ._choices import choices
from ._owners import leaves_with_info


def tree_shard(
    model: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh | None = None
) -> PyTree:
    """Places the arrays of a model on the devices of a mesh. Specs refer to the axes
    of each array, whether or not it is quantized.

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

    - `model`: any PyTree. Its arrays may be `jax.ShapeDtypeStruct`s, which then get a
        sharding.
    - `specs`: which axes of each array are split over which axes of the mesh. Either

        - a PyTree that is a prefix of `model`, whose leaves are each a `PartitionSpec`,
          a `NamedSharding`, or `None` to leave an array where it is. For a weight with
          an adapter of [`eqquant.train.lora`][], or of
          [`eqquant.train.tree_fake_quantize`][], the spec refers to the weight.
        - [`eqquant.Rules`][] from paths to these. The first that matches decides, and
          an array that no rule matches stays where it is.

    - `mesh`: the mesh that `PartitionSpec`s refer to. By default the one that
        `jax.set_mesh` set.

    **Returns:**

    `model`, with its arrays placed. Each quantized array declares its placement as its
    `sharding`.

    **Raises:**

    A `ValueError` if there is no mesh, if a spec has more axes than an array, or if it
    would split a byte or a block. The error names the array, and the nearest specs that
    are possible.
    """
    if not isinstance(mesh, Mesh | AbstractMesh | None):
        raise TypeError(
            f"`mesh` should be a `jax.sharding.Mesh` or None. Got {mesh!r}."
        )
    is_leaf = lambda x: _is_weight(x) or _is_array(x)
    leaves = list(leaves_with_info(model, is_leaf))
    found = choices(
        specs,
        model,
        [info for _, info in leaves],
        argument="specs",
        is_leaf=is_leaf,
        is_spec_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
        strict=False,
    )
    shard = once_per_array(lambda leaf, spec: _shard(leaf, _named(spec, mesh, leaf)))
    new = []
    for (leaf, info), choice in zip(leaves, found, strict=True):
        spec = _checked(choice.value)
        if info is not None and spec is not None:
            try:
                leaf = shard(leaf, spec)
            except ValueError as e:
                raise ValueError(f"Could not shard `{info.path}`: {e}") from e
        new.append(leaf)
    return jtu.tree_structure(model, is_leaf=is_leaf).unflatten(new)


def _checked(spec):
    if spec is None or isinstance(spec, PartitionSpec | NamedSharding):
        return spec
    raise TypeError(
        "Each of `specs` should be a `PartitionSpec`, a `NamedSharding` or None. Got "
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
            f"A `PartitionSpec` needs a mesh. Got {spec}: pass `mesh`, or set one by "
            "`jax.set_mesh`."
        )
    return NamedSharding(mesh, spec)


def _shard(leaf, sharding):
    if _is_weight(leaf):
        return leaf.with_sharding(sharding)
    spec = full_spec(sharding.spec, len(leaf.shape))
    return placed(leaf, NamedSharding(sharding.mesh, spec))


def _is_weight(x: Any) -> bool:
    return isinstance(x, AbstractArrayLike)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
