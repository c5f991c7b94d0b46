import importlib
import importlib.util
import itertools as it
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TYPE_CHECKING, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..._array import quantize, QuantizedArray
from ..._product import (
    as_entry,
    names_of,
    number_of_shards,
    placed,
    splits_evenly,
    vary_together,
)
from ...formats import AbstractGrid


if TYPE_CHECKING:
    import optax


# A running mean of gradients or of their squares: either flattened and quantized, or in
# float32 with the shape of the parameter.
Moment: TypeAlias = QuantizedArray | Array

# A hyperparameter; an array under `optax.inject_hyperparams`.
Scalar: TypeAlias = float | int | Array

# A hyperparameter that determines shapes; it may also be an array.
Size: TypeAlias = int | Array


def optax_library() -> Any:
    """Imports optax, which is an optional dependency."""
    if importlib.util.find_spec("optax") is None:
        raise ModuleNotFoundError(
            "Optimizers are gradient transformations of optax, which is not "
            "installed. Install it by `pip install eqquant[train]`."
        )
    return importlib.import_module("optax")


def chained(
    scale_by: "optax.GradientTransformation",
    learning_rate: Scalar | Callable[[Any], Any],
    weight_decay: Scalar,
    mask: Any,
) -> "optax.GradientTransformation":
    """Follows `scale_by` with weight decay and the learning rate."""
    library = optax_library()
    return library.chain(
        scale_by,
        library.add_decayed_weights(weight_decay, mask),
        library.scale_by_learning_rate(learning_rate),
    )


def unbiased(
    m: Array, g: Array, t: Array, b: Scalar, rest: Scalar, nesterov: bool
) -> Array:
    """Corrects the running mean `m` of `t` gradients, of which `g` is the last, for its
    start at zero. Nesterov's momentum counts `g` once more."""
    if nesterov:
        return b * m / (1 - b ** (t + 1)) + rest * g / (1 - b**t)
    return m / (1 - b**t)


class Storage(NamedTuple):
    """How moments are stored: in `format`, for parameters that `filter_spec` selects
    and that have at least `min_size` elements, except (by default) embeddings. All
    others are in float32."""

    format: Callable[..., AbstractGrid]
    block_size: Size | None
    filter_spec: PyTree
    min_size: Size
    embeddings: bool

    def zeros(self, params: PyTree, signed: bool) -> PyTree[Moment]:
        """Returns the initial moments. Each is sharded over the devices of its
        parameter."""
        block = self.block_size
        block = None if block is None else static("block_size", block)
        stored = self.format(block, signed=signed, dithered=True)
        least = static("min_size", self.min_size)

        def zero(x, selected, embedding):
            _check(x)
            is_selected = selected and (self.embeddings or not embedding)
            if is_selected and np.size(x) >= least:
                return _zeros(x, stored)
            return jnp.zeros_like(x, jnp.float32)

        selected = _extended(self.filter_spec, params)
        return jtu.tree_map(zero, params, selected, _embeddings(params))


def _check(x):
    if not isinstance(x, jax.ShapeDtypeStruct) and not eqx.is_array_like(x):
        raise ValueError(
            f"`params` should have arrays only. Got {x}. Pass "
            "`eqx.filter(model, eqx.is_inexact_array)`."
        )
    if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
        raise ValueError(
            "`params` should be real, since moments are. Got an array of "
            f"{jnp.result_type(x)}. For complex ones, wrap the optimizer in "
            "`optax.contrib.split_real_and_imaginary`."
        )


def static(name: str, value: Size) -> int:
    """Returns the integer `value`, which may be an array under
    `optax.inject_hyperparams`."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"`{name}` should be a static integer. Pass it to "
            f"`optax.inject_hyperparams` as one of the `static_args`. Got {value}."
        )
    try:
        return operator.index(value)
    except TypeError as e:
        raise TypeError(f"`{name}` should be an integer. Got {value!r}.") from e


def _zeros(x, format):
    sharding = _flat_sharding(x, format)
    # Without the barrier, XLA would fold the constant, and quantize it slowly at
    # compile time.
    if not isinstance(x, Tracer):
        flat = jnp.zeros(x.size, jnp.float32, device=sharding)
        return quantize(lax.optimization_barrier(flat), format)
    flat = lax.optimization_barrier(jnp.zeros(x.size, jnp.float32))
    flat = flat if sharding is None else placed(flat, sharding)
    return quantize(vary_together(x, flat)[1], format)


def _flat_sharding(x, format):
    # The flat moments are split over the same mesh axes as the parameter, in the same
    # order: if the parameter is split along its first axis, each device then has the
    # moments of its own part. If this would cut blocks, they are split over the largest
    # subset of these mesh axes that does not.
    sharding = None
    if isinstance(x, Tracer):
        typed = jax.typeof(x).sharding
        sharding = typed if typed.mesh.explicit_axes else None
    elif isinstance(x, jax.Array):
        sharding = x.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = sharding.mesh
    names = [name for entry in sharding.spec for name in names_of(entry)]
    subsets = (
        as_entry(subset)
        for number in range(len(names) + 1)
        for subset in it.combinations(names, number)
    )
    shards = lambda entry: number_of_shards(mesh, entry)
    fit = [e for e in subsets if splits_evenly(format, (), x.size, shards(e))]
    return NamedSharding(mesh, PartitionSpec(max(fit, key=shards)))


def _extended(filter_spec, params):
    def extend(spec, subtree):
        def select(x):
            found = spec(x) if callable(spec) else spec
            if not eqx.is_array_like(found):
                raise TypeError(
                    "`filter_spec` should be a prefix of `params` whose leaves are "
                    "booleans, or functions from a parameter to a boolean. Got "
                    f"{found!r}."
                )
            return bool(found)

        return jtu.tree_map(select, subtree)

    return jtu.tree_map(extend, filter_spec, params)


def _embeddings(params):
    is_embedding = lambda x: isinstance(x, eqx.nn.Embedding)

    def flags(node):
        return jtu.tree_map(lambda _: is_embedding(node), node)

    return jtu.tree_map(flags, params, is_leaf=is_embedding)
