import functools as ft
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.tree_util as jtu
import numpy as np

from ...formats import AbstractFormat
from .._containers import FileLayout, gguf_layout, Part, safetensors_layout
from .._layouts import gguf_parts, layouts, parts_of, writers
from .._own import described, to_part
from .._tensors import to_tensor


class Target(NamedTuple):
    """How files are to be written.

    - `suffix`: of their names.
    - `parts`: the tensors of an array, by its name and itself (or a stand-in).
    - `layout`: of a file, by its parts, which of all files it is, and how many of these
      and of all tensors there are.
    - `config`: what is to be said beside them, by the formats of arrays.
    - `index`: what the index of several files is to say, besides where tensors are.
      `None` if there is no index.
    """

    suffix: str
    parts: Callable[[str, Any], dict[str, Part]]
    layout: Callable[[Mapping[str, Part], int, int, int], FileLayout]
    config: Callable[[dict[str, AbstractFormat]], dict[str, Any]]
    index: dict[str, str] | None


def check_kind(to: str) -> None:
    kinds = ("eqquant", "gguf", *writers())
    if to not in kinds:
        raise ValueError(f"`to` should be one of {', '.join(kinds)}. Got {to!r}.")


def target(
    kind: str, stand_ins: Mapping[str, Any], metadata: dict[str, Any], index: str
) -> Target:
    """**Arguments:**

    - `stand_ins`: all arrays, without their numbers.
    - `metadata`: of the source.
    - `index`: the name of the index of several files.
    """
    if kind == "gguf":
        return _gguf(metadata)
    if kind == "eqquant":
        return _own(stand_ins, index)
    library = layouts[kind]
    layout = lambda parts, i, number, total: _layout(parts, library.metadata)
    parts = ft.partial(parts_of, library)
    return Target(".safetensors", parts, layout, library.config, {})


def _layout(parts, metadata):
    return safetensors_layout({k: part.type for k, part in parts.items()}, metadata)


def _gguf(metadata):
    def layout(parts, i, number, total):
        if number == 1:
            return gguf_layout(parts, metadata)
        # The first has all that there is to say.
        said = dict(metadata) if i == 0 else {}
        said["split.no"] = np.uint16(i)
        said["split.count"] = np.uint16(number)
        said["split.tensors.count"] = np.int32(total)
        return gguf_layout(parts, said)

    metadata = {k: v for k, v in metadata.items() if not k.startswith("split.")}
    parts = ft.partial(gguf_parts, metadata=metadata)
    return Target(".gguf", parts, layout, lambda formats: {}, None)


def _own(stand_ins, index):
    # The files of `save`, with quantized arrays in rows.
    tensors, header = described(_nested(stand_ins), numpy=False)
    names = {id(tensor.array): name for name, tensor in tensors.items()}
    names = {
        name: [names[id(leaf)] for leaf in jtu.tree_leaves(_stored(x))]
        for name, x in stand_ins.items()
    }

    def parts(name, x):
        def part(key, x):
            kind, shape = tensors[key].type.tensor_type
            return Part(kind, shape, lambda: to_tensor(np.asarray(x)))

        leaves = jtu.tree_leaves(_stored(x))
        return {key: part(key, leaf) for key, leaf in zip(names[name], leaves)}

    def layout(parts, i, number, total):
        said = header if number == 1 else to_part(index)
        return _layout(parts, said)

    return Target(".safetensors", parts, layout, lambda formats: {}, header)


def _stored(x):
    return getattr(x, "stored", x)


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The tree that dotted names are the paths of: of dictionaries; and of lists, where
    the names below are 0, 1, ..., each of which is there."""
    groups: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        first, dot, rest = name.partition(".")
        # A name may also be the beginning of another one.
        if not dot or first in arrays:
            found[name] = x
        else:
            groups.setdefault(first, {})[rest] = x
    return found | {first: _as_list(_nested(group)) for first, group in groups.items()}


def _as_list(tree):
    keys = [str(i) for i in range(len(tree))]
    return [tree[key] for key in keys] if set(keys) == set(tree) else tree
