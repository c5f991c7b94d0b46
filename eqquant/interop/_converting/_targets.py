import functools as ft
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.tree_util as jtu
import numpy as np

from ...formats import AbstractFormat
from .._containers import FileLayout, gguf_layout, Part, safetensors_layout
from .._layouts import gguf_parts, layouts, parts_of, parts_of_each, writers
from .._llama_cpp import file_type, ModelFile
from .._own import described, naming, to_part
from .._tensors import to_tensor


class Target(NamedTuple):
    """The functions that write a kind of file.

    - `suffix`: the suffix of the names of files.
    - `parts`: returns the tensors of an array, given its name and the array, which may
      be a struct without numbers.
    - `layout`: returns the layout of a file, given its tensors, its position, the
      number of files, and the total number of tensors.
    - `config`: returns the configuration, given the formats of arrays by their names.
    - `index`: the metadata of the index of several files. `None` if there is no index.
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
    kind: str,
    structs: Mapping[str, Any],
    metadata: dict[str, Any],
    index: str,
    config: str | os.PathLike[str] | None = None,
    metadata_beside: str | None = None,
) -> Target:
    """Returns the functions that write a kind of file.

    - `kind`: as `to` in [`eqquant.interop.convert`][].
    - `structs`: all arrays, as structs without numbers.
    - `metadata`: the metadata of a GGUF source.
    - `index`: the name of the index of several files.
    - `config`: for a file that llama.cpp loads, as in [`eqquant.interop.write_gguf`][].
    - `metadata_beside`: the name of a file with the metadata, next to files of eqquant.
    """
    if kind == "gguf" and config is not None:
        model = ModelFile(config, structs)
        return _gguf(model.metadata, model.parts)
    if kind == "gguf":
        parts = ft.partial(gguf_parts, metadata=metadata)
        if "general.file_type" in metadata:
            found = parts_of_each(parts, structs).values()
            metadata |= file_type([part for parts in found for part in parts.values()])
        return _gguf(metadata, parts)
    if kind == "eqquant":
        return _own(structs, index, metadata_beside)
    library = layouts[kind]
    layout = lambda parts, i, number, total: _layout(parts, library.metadata)
    parts = ft.partial(parts_of, library)
    return Target(".safetensors", parts, layout, library.config, {})


def _layout(parts, metadata):
    return safetensors_layout({k: part.type for k, part in parts.items()}, metadata)


def _gguf(metadata, parts):
    def layout(parts, i, number, total):
        if number == 1:
            return gguf_layout(parts, metadata)
        # The first file has all other metadata.
        own = dict(metadata) if i == 0 else {}
        own["split.no"] = np.uint16(i)
        own["split.count"] = np.uint16(number)
        own["split.tensors.count"] = np.int32(total)
        return gguf_layout(parts, own)

    return Target(".gguf", parts, layout, lambda formats: {}, None)


def _own(structs, index, metadata_beside):
    # Returns the target for the files of `save`, with quantized arrays in rows.
    tensors, header = described(_nested(structs), numpy=False)
    if metadata_beside is not None:
        header |= naming(metadata_beside)
    names = {id(tensor.array): name for name, tensor in tensors.items()}
    names = {
        name: [names[id(leaf)] for leaf in jtu.tree_leaves(_stored(x))]
        for name, x in structs.items()
    }

    def parts(name, x):
        def part(key, x):
            kind, shape = tensors[key].type.tensor_type
            return Part(kind, shape, lambda: to_tensor(np.asarray(x)))

        leaves = jtu.tree_leaves(_stored(x))
        return {key: part(key, leaf) for key, leaf in zip(names[name], leaves)}

    def layout(parts, i, number, total):
        return _layout(parts, header if number == 1 else to_part(index))

    return Target(".safetensors", parts, layout, lambda formats: {}, header)


def _stored(x):
    return getattr(x, "stored", x)


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree whose paths are the dotted names. It has lists where the keys
    are 0, 1, ... without gaps, and dictionaries elsewhere."""
    groups: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        first, dot, rest = name.partition(".")
        # A name that is also the prefix of another one stays a flat key.
        if not dot or first in arrays:
            found[name] = x
        else:
            groups.setdefault(first, {})[rest] = x
    return found | {first: _as_list(_nested(group)) for first, group in groups.items()}


def _as_list(tree):
    keys = [str(i) for i in range(len(tree))]
    return [tree[key] for key in keys] if set(keys) == set(tree) else tree
