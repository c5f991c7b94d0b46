from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


# The keys and values of all layers at the positions so far.
Cache = Float[Array, "l 2 h s c"]
_Layer = TypeVar("_Layer", bound=Callable[..., Any])


def through(
    layers: _Layer | list[_Layer],
    x: Float[Array, "t d"],
    start: Any,
    past: Cache | None,
) -> tuple[Float[Array, "t d"], Cache | None]:
    """Calls layers one after another, `x, past[i] = layer(x, start, past[i])`. A stack,
    whose arrays have a leading axis of layers, is scanned; a list is unrolled."""
    if not isinstance(layers, list):
        arrays, static = eqx.partition(layers, eqx.is_array)
        layer = lambda x, a: eqx.combine(a[0], static)(x, start, a[1])
        return jax.lax.scan(layer, x, (arrays, past))
    for i, layer in enumerate(layers):
        x, new = layer(x, start, None if past is None else past[i])
        past = None if past is None else past.at[i].set(new)
    return x, past


def stacked(layers: _Layer | list[_Layer]) -> _Layer:
    """Stacks layers, which should have the same structure."""
    if not isinstance(layers, list):
        return layers
    if len({jax.tree.structure(layer) for layer in layers}) > 1:
        raise ValueError(
            "Layers should be alike to be a stack. Some arrays have another format in "
            "some layers: `eqquant.tree_dequantize(model).stacked()`."
        )
    arrays, static = zip(*(eqx.partition(layer, eqx.is_array) for layer in layers))
    return eqx.combine(jax.tree.map(lambda *a: jnp.stack(a), *arrays), static[0])


def listed(layers: _Layer, number: int) -> list[_Layer]:
    """Returns the skeletons of the layers in the skeleton of a stack."""
    first = lambda layers: jax.tree.map(lambda a: a[0], layers)
    return [eqx.filter_eval_shape(first, layers) for _ in range(number)]
