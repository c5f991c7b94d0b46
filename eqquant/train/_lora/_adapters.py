import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._array import is_quantized, quantize
from ..._tree import is_on_call, not_on_call, rebuilt
from ...formats import AbstractFormat
from ._array import LoRA
from ._lora import (
    adapted,
    check_no_adapters,
    is_lora,
    is_weight,
    lora_spec,
    rows_first,
    with_magnitude,
)


def lora_only(model: PyTree) -> dict[str, dict[str, Any]]:
    """Returns only the adapters of a model, to save them in their own file.

    !!! Example

        ```python
        eqquant.save("adapters.safetensors", eqquant.train.lora_only(model))

        model = eqquant.load("model.safetensors", like=model)  # without adapters
        adapters = eqquant.load("adapters.safetensors")
        model, spec = eqquant.train.with_lora(model, adapters)
        ```

    **Arguments:**

    - `model`: as returned by [`eqquant.train.lora`][].

    **Returns:**

    A dictionary from the path of each adapted weight to its `"a"`, `"b"`, `"scale"` and
    `"axis"`, and for DoRA its `"magnitude"`. Paths are dotted: `"layers.0.weight"`. Two
    weights with the same dotted path, as in `{"a.b": w, "a": {"b": w}}`, are written
    `"['a.b']"` and `"['a']['b']"` instead.

    **Raises:**

    A `ValueError` if the model has no adapters.
    """
    found = {
        path: {
            name: value
            for name in ("a", "b", "magnitude", "scale", "axis")
            if (value := getattr(node, name)) is not None
        }
        for path, node in _with_paths(model)
        if is_lora(node)
    }
    if len(found) == 0:
        raise ValueError("`model` should have adapters. It has none.")
    return found


def with_lora(
    model: PyTree, adapters: Mapping[str, Mapping[str, Any]], *, example: Any = None
) -> tuple[PyTree, PyTree[bool]]:
    """Adds trained adapters to the model that they were trained for.

    **Arguments:**

    - `model`: a model without adapters, quantized or dense.
    - `adapters`: the result of [`eqquant.train.lora_only`][], or its copy loaded from a
        file.
    - `example`: as in [`eqquant.train.lora`][], if one was passed to it.

    **Returns:**

    The model with the adapters, and the filter for training them, as from
    [`eqquant.train.lora`][].

    **Raises:**

    A `ValueError` if the adapters do not fit the model (it has no array at one of the
    paths, or one of another shape), or if it has adapters already.
    """
    check_no_adapters(model)
    left = dict(adapters)

    def adapt(path, leaf):
        return _adapted(path, leaf, left.pop(path)) if path in left else leaf

    leaves = [adapt(*pair) for pair in _with_paths(model)]
    if left:
        raise ValueError(
            "`adapters` should be for weights of `model`, which has no array at "
            f"{', '.join(map(repr, left))}."
        )
    model = adapted(model, leaves, example)
    return model, lora_spec(model)


def merge_lora(model: PyTree, format: AbstractFormat | str | None = None) -> PyTree:
    """Adds the trained adapters to the weights and removes them from the model.

    **Arguments:**

    - `model`: a model with adapters, as from [`eqquant.train.lora`][].
    - `format`: the format, or its name, in which to quantize the merged weights. By
        default they become dense arrays. (To quantize them in several formats, call
        [`eqquant.tree_quantize`][] on the dense result.)

    **Returns:**

    The model without adapters. Weights that had none are unchanged.

    **Raises:**

    A `ValueError` if there are no adapters, or if a merged weight is not finite.
    """
    nodes = jtu.tree_leaves(model, is_leaf=is_lora)
    if not any(map(is_lora, nodes)):
        raise ValueError("`model` should have adapters. It has none.")

    def merge(node):
        if not is_lora(node):
            return node
        w = eqx.filter_jit(LoRA.dequantize)(node)
        if format is None:
            return w
        activation = node.base.activation if is_quantized(node.base) else None
        return quantize(w, format, axis=node.axis, activation=activation)

    def undo(node, new):
        # Undoes the call of modules that ran on call for their adapters.
        needs = any(map(is_weight, jtu.tree_leaves(new, is_leaf=is_weight)))
        return not_on_call(new) if is_on_call(node) and not needs else new

    return rebuilt(model, map(merge, nodes), undo, is_lora)


def _adapted(path, leaf, adapter):
    a, b, axis = jnp.asarray(adapter["a"]), jnp.asarray(adapter["b"]), adapter["axis"]
    if not (is_weight(leaf) or eqx.is_array(leaf)):
        raise ValueError(
            "`adapters` should be for arrays of `model`. Got an adapter of "
            f"{path!r}, which is not an array."
        )
    axis = tuple(axis) if isinstance(axis, list | tuple) else axis
    stack, n, k = rows_first(leaf.shape, axis, path)
    rank = a.shape[-2]
    if (a.shape, b.shape) != ((*stack, rank, k), (*stack, n, rank)):
        raise ValueError(
            f"The adapters of {path!r} have shapes {a.shape} and {b.shape}, which do "
            f"not fit an array of shape {leaf.shape}."
        )
    w = LoRA(leaf, a, b, None, None, axis=axis, scale=adapter["scale"])
    if "magnitude" not in adapter:
        return w
    magnitude = jnp.asarray(adapter["magnitude"])
    w = with_magnitude(w, magnitude.dtype)
    return dataclasses.replace(w, magnitude=magnitude)


def _with_paths(model):
    is_leaf = lambda x: is_lora(x) or is_weight(x)
    found, _ = jtu.tree_flatten_with_path(model, is_leaf=is_leaf)
    paths, leaves = [keys for keys, _ in found], [x for _, x in found]
    return list(zip(_names(paths), leaves))


def _names(paths):
    # Dotted paths; but if keys contain dots, so that two paths would have the same
    # name, paths in Python's notation.
    exact = [jtu.keystr(keys) for keys in paths]
    names = [jtu.keystr(keys, simple=True, separator=".") for keys in paths]
    while len(set(names)) < len(names):
        count = Counter(names)
        new = [e if count[name] > 1 else name for e, name in zip(exact, names)]
        if new == names:
            same = next(name for name in names if count[name] > 1)
            raise ValueError(
                f"`model` should have distinct paths. Got two arrays at {same}."
            )
        names = new
    return names
