import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._array import is_quantized, side_by_side
from .._tree import layers_on_call
from ._checkpoint import Checkpoint
from ._layouts import check_architecture
from ._nodes import by_name, dotted, is_array, is_data, leaves
from ._own import named_sharding
from ._renaming import evaluated, has_table, moved, near, Piece, sources
from ._tensors import for_jax


# Hints are limited, because each compares a name with all paths.
_most_hints = 10
_number = re.compile(r"\d+")


def load_into(
    model: PyTree, tree: Any, rename: Any = None, *, strict: bool = True
) -> PyTree:
    """Loads the arrays of a checkpoint into a model.

    !!! Example

        ```python
        model = eqx.filter_eval_shape(Llama, config, key)
        checkpoint = eqquant.interop.open("model.gguf")
        model = eqquant.interop.load_into(
            model,
            checkpoint,
            rename=["llama", {"model.*": "*", "lm_head.*": "head.*"}],
        )

        # A stack of all layers, with one array for the projections of queries, keys and
        # values.
        qkv = Join(*(f"layers.{{i}}.self_attn.{x}_proj.weight" for x in "qkv"))
        rename = {
            qkv: "layers.qkv.weight",
            "layers.{i}.self_attn.o_proj.weight": "layers.output.weight",
            "layers.{i}.mlp.experts.{e}.{x}.weight": "layers.experts.{x}.weight",
        }
        ```

    **Arguments:**

    - `model`: a PyTree of arrays, or of structs from `eqx.filter_eval_shape`, which
        avoids a dense copy of the model. An array that is quantized in `tree` is
        quantized in the result. Matrices are `(out, in)`, as in `eqx.nn.Linear`.
    - `tree`: an [`eqquant.interop.Checkpoint`][], whose arrays are read one at a time;
        or a PyTree of arrays, whose names are the paths of keys, joined by dots.
    - `rename`: maps the names of `tree` to the paths of `model`, such as
        `"layers.0.attention.q_proj.weight"`. One of the following, or a list of them,
        which are applied in turn:

        - a dictionary from patterns to names. The first pattern that matches applies.
          In a pattern, each `*` matches any text, and each `{field}` text without dots;
          the name has the same `*` and fields. `None` leaves the array out, and a tuple
          of names puts it in several places.
        - a pair of a pattern and a name;
        - a function from a name to a name, to `None` or to a tuple of names;
        - `"llama"`, `"mistral"` or `"qwen"`: from llama.cpp's names to Hugging Face's,
          for models of this family. (All three are the same. The architecture of a GGUF
          file must be one whose rows of queries and keys, and whose norms,
          [`eqquant.interop.open`][] converts to Hugging Face's.)

        Dictionaries and pairs can also combine arrays, or take them apart. If the name
        lacks a field of the pattern, the field must match numbers: the arrays are
        stacked in their order, along new leading axes. A field that only the name has
        is an index into such a stack. A pattern may be a [`eqquant.interop.Join`][] or
        a [`eqquant.interop.Sum`][], and a name a [`eqquant.interop.Split`][], a
        [`eqquant.interop.Transposed`][] or a [`eqquant.interop.Quantized`][]. Packed
        codes are copied, and only `Quantized` decodes them.

    - `strict`: whether it is an error if an array of the model is missing in `tree`, or
        if an array of `tree` is not used. If false, this is a warning, and arrays of
        the model that are missing are kept.

    **Returns:**

    The model. Its floating-point arrays keep their dtypes, and arrays on a mesh their
    shardings. Dense arrays get the axes of size one that the model's arrays have, such
    as the bias of a convolution. Equinox layers that need dense arrays, such as
    convolutions, run under [`eqquant.implicit`][] if their weights are quantized.

    **Raises:**

    A `ValueError` that lists all differences, with the most similar names: arrays that
    are missing, not used, of another shape, or that cannot be joined.
    """
    if isinstance(tree, Checkpoint) and has_table(rename):
        check_architecture(tree.metadata, "Load it with patterns of `rename`.")
    found = _found(tree)
    places = by_name(model, "model", is_array)
    if isinstance(tree, Checkpoint):
        read = tree.__getitem__
    else:
        read = lambda name: _to_move(found[name])
    bad = _unreadable(tree)
    shapes = {path: leaf.shape for path, leaf in places.items()}
    named, problems, hidden = moved(sources(found, read), rename, shapes)
    used = dict.fromkeys(name for _, piece in named for name in piece.names)
    problems += [bad[name] for name in used if name in bad]
    pieces: dict[str, Piece] = {}
    loose = []
    for path, piece in named:
        if path not in places:
            loose.append(_not_used(path, piece, places, len(loose) < _most_hints))
        elif path in pieces:
            both = " and ".join(_names(x) for x in (pieces[path], piece))
            problems.append(f"{path!r} is both {both}.")
        else:
            pieces[path] = piece
            problems += _difference(path, places[path], piece)
    unused = [path for path, _ in named if path not in places]
    missing = [path for path in places if path not in pieces]
    for i, path in enumerate(missing):
        hint = near(path, unused) if i < _most_hints else ""
        loose.append(f"{path!r} is missing{hint or '.'}")
    if problems or (loose and strict):
        raise ValueError(_message([*loose, *problems, *hidden], found, rename))
    if loose:
        warnings.warn(_message([*loose, *hidden], found, rename), stacklevel=2)
    filled: dict[str, Any] = {}
    paths = list(pieces)

    def use(i, x):
        filled[paths[i]] = _placed(x, places[paths[i]])

    evaluated(list(pieces.values()), use)
    new = [
        filled.get(dotted(path), old) if is_array(old) else old
        for path, old in leaves(model)
    ]
    treedef = jtu.tree_structure(model, is_leaf=is_quantized)
    return layers_on_call(jtu.tree_unflatten(treedef, new))


def _found(tree):
    if isinstance(tree, Checkpoint):
        return tree.entries
    return by_name(tree, "tree", is_data)


def _unreadable(tree):
    # Lists the parts of quantized arrays that no layout reads.
    entries = tree.entries if isinstance(tree, Checkpoint) else {}
    return {
        name: f"{name!r} cannot be read: {entry.problem}"
        for name, entry in entries.items()
        if entry.why_not is not None
    }


def _to_move(x):
    # Rows can be taken apart and joined only if they are stored side by side.
    if is_quantized(x):
        return side_by_side(x)
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    return for_jax(x) if is_integer and isinstance(x, np.ndarray) else x


def _difference(path, leaf, piece):
    if piece.shape != leaf.shape and not _has_more_axes(leaf, piece):
        hint = ""
        if piece.shape == leaf.shape[::-1]:
            hint = (
                f" It is transposed: `rename` it to `Transposed({path!r})`, or write "
                "the layer as `w @ x`."
            )
        return [
            f"{path!r} should have shape {leaf.shape}. Got {_names(piece)} of shape "
            f"{piece.shape}.{hint}"
        ]
    both = (leaf.dtype, piece.dtype)
    if jnp.issubdtype(piece.dtype, jnp.integer):
        both = (leaf.dtype, jax.dtypes.canonicalize_dtype(piece.dtype))
    if both[0] != both[1] and not all(
        jnp.issubdtype(dtype, jnp.floating) for dtype in both
    ):
        return [
            f"{path!r} should be of {leaf.dtype}. Got {_names(piece)} of {piece.dtype}."
        ]
    return []


def _has_more_axes(leaf, piece):
    # Whether the shapes differ only in axes of size one. (A quantized array must keep
    # its axes, because it is contracted along one of them.)
    sizes = [tuple(n for n in x.shape if n != 1) for x in (leaf, piece)]
    more = len(leaf.shape) > len(piece.shape)
    return piece.format is None and more and sizes[0] == sizes[1]


def _not_used(path, piece, places, has_hint):
    becomes = "" if piece.names == (path,) else f", as {path!r}"
    hint = near(path, places) if has_hint else ""
    return f"{_names(piece)} is not used{becomes}{hint or '.'}"


def _names(piece):
    more = f" and {len(piece.names) - 3} more" if len(piece.names) > 3 else ""
    return ", ".join(map(repr, piece.names[:3])) + more


def _placed(x, leaf):
    sharding = named_sharding(leaf)
    if is_quantized(x):
        x = x if x.dtype == leaf.dtype else x.astype(leaf.dtype)
        return x if sharding is None else x.with_sharding(sharding)
    x = jnp.asarray(x, leaf.dtype).reshape(leaf.shape)
    return x if sharding is None else jax.device_put(x, sharding)


def _message(problems, found, rename):
    hint = ""
    if rename is None and any(name.startswith("blk.") for name in found):
        hint = " These are names of llama.cpp: see `rename`."
    lines = "".join(f"\n- {problem}" for problem in _once_each(problems))
    return f"`tree` does not fit `model`.{hint}{lines}"


def _once_each(problems):
    # Merges sentences that differ only in numbers, such as the index of a layer, into
    # the first.
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(_number.sub("#", problem), []).append(problem)
    for first, *others in alike.values():
        rest = (
            "1 other but for its"
            if len(others) == 1
            else f"{len(others)} others but for their"
        )
        yield first + (f" (And {rest} numbers.)" if others else "")
