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


# A hint compares a name with all paths.
_most_hints = 10


def load_into(
    model: PyTree, tree: Any, rename: Any = None, *, strict: bool = True
) -> PyTree:
    """Replaces the arrays of a model by those of a checkpoint.

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
        without. An array that is quantized in `tree` is quantized in the result.
        Matrices have to be `(out, in)`, as in `eqx.nn.Linear`.
    - `tree`: a [`eqquant.interop.Checkpoint`][], of which one array at a time is read;
        or a PyTree of arrays, whose names are the paths of keys, joined by dots.
    - `rename`: maps the names of `tree` to the paths of `model`, such as
        `"layers.0.attention.q_proj.weight"`. One of these, or a list of them, applied
        in turn:

        - a dictionary from patterns to names. The first pattern that matches counts;
          each `*` matches any text, which replaces the `*` in the name. `None` leaves
          the array out, and a tuple of names puts it in several places.
        - a pair of a pattern and a name;
        - a function from a name to a name, to `None` or to a tuple of names;
        - `"llama"`, `"mistral"` or `"qwen"`: from the names of llama.cpp to those of
          Hugging Face, for models of this family.
    - `strict`: whether it is an error if an array of the model is missing in `tree`, or
        one of `tree` is not used. If false, this is a warning, and arrays that are
        missing stay as they are.

    **Returns:**

    The model. Its floating-point arrays keep their dtypes, and arrays on a mesh their
    shardings.

    **Raises:**

    A `ValueError` that lists all differences: each array that is missing, not used, or
    of another shape.
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
                f"`{argument}` should have different names for all arrays. Got "
                f"{name!r} twice, since one of its keys has a dot."
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
            hint = " It is transposed: pass its `.T`, or write the layer as `w @ x`."
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
