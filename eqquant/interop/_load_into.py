import difflib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import is_quantized
from ._checkpoint import Checkpoint
from ._nodes import dotted, is_data, leaves, python_scalar
from ._own import named_sharding
from ._rename import renamed


# Each takes a comparison with all paths.
_most_hints = 10


def load_into(
    model: PyTree, tree: Any, rename: Any = None, *, strict: bool = True
) -> PyTree:
    """Puts the arrays of a checkpoint in the places of a model's.

    !!! Example

        ```python
        model = eqx.filter_eval_shape(Llama, config, key)
        checkpoint = eqquant.interop.open("model.gguf")
        model = eqquant.interop.load_into(
            model,
            checkpoint,
            rename=["llama", {"model.*": "*", "lm_head.*": "head.*"}],
        )
        ```

    **Arguments:**

    - `model`: a PyTree, with its arrays or, as `eqx.filter_eval_shape` makes it,
        without. An array that is quantized in `tree` is so in the model, and multiplies
        as it did. It has to be of the same shape: `(out, in)`, as in `eqx.nn.Linear`.
    - `tree`: a [`eqquant.interop.Checkpoint`][], of which one array is read after
        another; or a PyTree of arrays. Names have dots, whether they are keys as a
        whole or paths of keys.
    - `rename`: from the names of `tree` to the paths of `model`, such as
        `"layers.0.attention.q_proj.weight"`. One of these, or a list of them, that are
        applied in turn:

        - a dictionary from patterns to names. Each `*` of the first pattern that
          matches stands for anything, and goes where the name has a `*`. `None` leaves
          out what matches, and a tuple of names puts it in several places.
        - a pair of a pattern and a name;
        - a function from a name to a name, to `None` or to a tuple of names;
        - `"llama"`, `"mistral"` or `"qwen"`, for the names that llama.cpp has in models
          of this family: they become those of Hugging Face.
    - `strict`: whether it is an error if an array of the model is missing, or one of
        `tree` is not used. If false then this is only warned of: what is missing stays
        as it is.

    **Returns:**

    The model. Its floating-point arrays have the dtypes that they had, and are placed
    as they were, if that was over a mesh.

    **Raises:**

    A `ValueError` that lists all that does not fit: each array that is missing, or not
    used, or of another shape.
    """
    found = _found(tree)
    places = _by_name(model, "model", _is_array)
    sources: dict[str, str] = {}
    problems, loose = [], []
    for name in found:
        paths = renamed(name, rename)
        for path in paths:
            if path not in places:
                becomes = "" if path == name else f", as {path!r}"
                near = _near(path, places) if len(loose) < _most_hints else ""
                loose.append(f"{name!r} is not used{becomes}.{near}")
            elif path in sources:
                problems.append(f"{path!r} is both {sources[path]!r} and {name!r}.")
            else:
                sources[path] = name
                problems += _difference(path, places[path], name, found[name])
    loose += [f"{path!r} is missing." for path in places if path not in sources]
    if problems or (loose and strict):
        raise ValueError(_message(loose + problems, found, rename))
    if loose:
        warnings.warn(_message(loose, found, rename), stacklevel=2)
    read: dict[str, Any] = {}

    def leaf(path, old):
        name = sources.get(dotted(path)) if _is_array(old) else None
        if name is None:
            return old
        if name not in read:
            read[name] = tree[name] if isinstance(tree, Checkpoint) else found[name]
        return _placed(read[name], old)

    filled = [leaf(path, old) for path, old in leaves(model)]
    treedef = jtu.tree_structure(model, is_leaf=is_quantized)
    return jtu.tree_unflatten(treedef, filled)


def _found(tree):
    if isinstance(tree, Checkpoint):
        return tree.entries
    return _by_name(tree, "tree", is_data)


def _by_name(tree, argument, wanted):
    found = {}
    for path, leaf in leaves(tree):
        name = dotted(path)
        if wanted(leaf) and name in found:
            raise ValueError(
                f"`{argument}` should have a name of its own for each array. Got two "
                f"that are {name!r}: one of its keys has a dot."
            )
        if wanted(leaf):
            found[name] = leaf
    return found


def _is_array(leaf):
    return is_data(leaf) and python_scalar(leaf) is None


def _difference(path, leaf, name, found):
    if found.shape != leaf.shape:
        hint = ""
        if found.shape == leaf.shape[::-1]:
            hint = " It is transposed: give its `.T`, or write the layer as `w @ x`."
        return [
            f"{path!r} should have shape {leaf.shape}. Got {name!r} of shape "
            f"{found.shape}.{hint}"
        ]
    both = (leaf.dtype, found.dtype)
    if leaf.dtype != found.dtype and not all(
        jnp.issubdtype(dtype, jnp.floating) for dtype in both
    ):
        return [f"{path!r} should be of {leaf.dtype}. Got {name!r} of {found.dtype}."]
    return []


def _placed(x, leaf):
    sharding = named_sharding(leaf)
    if is_quantized(x):
        x = x if x.dtype == leaf.dtype else x.astype(leaf.dtype)
        return x if sharding is None else x.with_sharding(sharding)
    x = jnp.asarray(x, leaf.dtype)
    return x if sharding is None else jax.device_put(x, sharding)


def _near(path, paths):
    near = difflib.get_close_matches(path, paths, n=1, cutoff=0.6)
    return f" Is it {near[0]!r}?" if near else ""


def _message(problems, found, rename):
    hint = ""
    if rename is None and any(name.startswith("blk.") for name in found):
        hint = " These are names of llama.cpp: see `rename`."
    lines = "".join(f"\n- {problem}" for problem in problems)
    return f"`tree` does not fit `model`.{hint}{lines}"
