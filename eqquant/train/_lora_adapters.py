import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import is_quantized, quantize
from ..formats import AbstractFormat
from ._lora import check_no_adapters, is_lora, lora_spec, rows_first, with_magnitude
from ._lora_array import LoRA


def lora_only(model: PyTree) -> dict[str, dict[str, Any]]:
    """The adapters of a model, without the model: for a file of their own.

    !!! Example

        ```python
        eqquant.save("adapters.safetensors", eqquant.train.lora_only(model))

        model = eqquant.load("model.safetensors", like=model)
        adapters = eqquant.load("adapters.safetensors")
        model, spec = eqquant.train.with_lora(model, adapters)
        ```

    **Arguments:**

    - `model`: as returned by [`eqquant.train.lora`][].

    **Returns:**

    A dictionary from the path of each weight that has adapters to those: `"a"`, `"b"`,
    `"scale"`, `"axis"`, and `"magnitude"` in the case of DoRA. Paths are dotted, as
    `"layers.0.weight"`. Where two would be the same, as those of `{"a.b": w, "a": {"b":
    w}}`, they are `"['a.b']"` and `"['a']['b']"`.

    **Raises:**

    A `ValueError` if there are none.
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
    model: PyTree, adapters: Mapping[str, Mapping[str, Any]]
) -> tuple[PyTree, PyTree[bool]]:
    """Puts adapters that have been trained next to the weights that they were trained
    with.

    **Arguments:**

    - `model`: without adapters; quantized or not.
    - `adapters`: as returned by [`eqquant.train.lora_only`][], or as loaded from what
        that was saved to.

    **Returns:**

    The model with the adapters, and the filter of what trains: as
    [`eqquant.train.lora`][] returns them.

    **Raises:**

    A `ValueError` if the adapters are not of this model: if it has no array at one of
    the paths, or one of another shape. And if it has adapters already.
    """
    check_no_adapters(model)
    left = dict(adapters)

    def adapt(path, leaf):
        return _adapted(path, leaf, left.pop(path)) if path in left else leaf

    leaves = [adapt(*pair) for pair in _with_paths(model)]
    if left:
        raise ValueError(
            "`adapters` should be of the weights of `model`, which has no array at "
            f"{', '.join(map(repr, left))}."
        )
    model = jtu.tree_unflatten(jtu.tree_structure(model, is_leaf=is_quantized), leaves)
    return model, lora_spec(model)


def merge_lora(model: PyTree, format: AbstractFormat | str | None = None) -> PyTree:
    """Adds the adapters of a model to its weights, so that it is as it was before it
    had any.

    **Arguments:**

    - `model`: as returned by [`eqquant.train.lora`][], and trained.
    - `format`: to quantize those weights in, or its name. By default they become
        ordinary arrays. (To quantize each in a format of its own,
        [`eqquant.tree_quantize`][] what this returns.)

    **Returns:**

    The model without adapters. Weights that had none stay as they are.

    **Raises:**

    A `ValueError` if there are no adapters, or if a sum is not finite.
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

    return jtu.tree_map(merge, model, is_leaf=is_lora)


def _adapted(path, leaf, adapter):
    a, b, axis = jnp.asarray(adapter["a"]), jnp.asarray(adapter["b"]), adapter["axis"]
    if not (is_quantized(leaf) or eqx.is_array(leaf)):
        raise ValueError(f"`adapters` are of {path!r}, which is no array of `model`.")
    n, k = rows_first(leaf.shape, axis, path)
    *stack, _, _ = leaf.shape
    rank = a.shape[-2]
    if (a.shape, b.shape) != ((*stack, rank, k), (*stack, n, rank)):
        raise ValueError(
            f"`adapters` of {path!r} are of shapes {a.shape} and {b.shape}, which do "
            f"not fit an array of shape {leaf.shape}."
        )
    w = LoRA(leaf, a, b, None, None, axis=axis, scale=adapter["scale"])
    if "magnitude" not in adapter:
        return w
    magnitude = jnp.asarray(adapter["magnitude"])
    w = with_magnitude(w, magnitude.dtype)
    return dataclasses.replace(w, magnitude=magnitude)


def _with_paths(model):
    is_leaf = lambda x: is_lora(x) or is_quantized(x)
    found, _ = jtu.tree_flatten_with_path(model, is_leaf=is_leaf)
    paths, leaves = [keys for keys, _ in found], [x for _, x in found]
    return list(zip(_names(paths), leaves))


def _names(paths):
    # Dotted. Where keys have dots themselves, so that two paths would have one name,
    # as they are written in Python.
    exact = [jtu.keystr(keys) for keys in paths]
    names = [jtu.keystr(keys, simple=True, separator=".") for keys in paths]
    while len(set(names)) < len(names):
        count = Counter(names)
        new = [e if count[name] > 1 else name for e, name in zip(exact, names)]
        if new == names:
            same = next(name for name in names if count[name] > 1)
            raise ValueError(
                "`model` should have keys that are written differently. Got two arrays "
                f"at {same}."
            )
        names = new
    return names
