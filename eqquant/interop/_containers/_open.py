import contextlib
import functools as ft
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ._file import MappedFile, RawTensor, short
from ._gguf import gguf_magic, read_gguf_header
from ._json import read_json
from ._safetensors import read_safetensors, starts_safetensors
from ._shards import (
    check_index,
    check_replaced,
    check_split,
    index_suffix,
    main_file,
    parts,
    read_index,
)


class Container(NamedTuple):
    """The tensors of a file, or of all files of a model, which are not read yet.

    - `is_gguf`: whether the files are GGUF, and not safetensors.
    - `tensors`: the tensors by their names.
    - `metadata`: the metadata of the files. (The first file wins if several have a
        key.)
    - `config`: reads the model's configuration from a JSON file next to it, if there is
        one.
    - `files`: the files, which stay open until `close`.
    """

    is_gguf: bool
    tensors: dict[str, RawTensor]
    metadata: dict[str, Any]
    config: Callable[[], dict[str, Any]]
    files: list[MappedFile]

    def close(self) -> None:
        for file in self.files:
            file.close()


def open_container(path: str | os.PathLike[str]) -> Container:
    """Opens a safetensors or GGUF file, an index of several, or a folder. Raises a
    `ValueError` if it is none of these, or damaged. Raises an `OSError` if it, or a
    file that belongs to it, cannot be read."""
    where = pathlib.Path(path)
    paths = main_file(where) if where.is_dir() else [where]
    index, metadata = None, {}
    if paths[0].name.endswith(index_suffix):
        where = paths[0]
        index, metadata = read_index(where)
        paths = [where.with_name(name) for name in sorted(set(index.values()))]
    elif paths[0].suffix == ".gguf":
        paths = parts(paths[0])
    check_replaced(paths[0], config_names(paths[0]))
    container = Container(False, {}, metadata, config_beside(paths[0]), [])
    with contextlib.ExitStack() as stack:
        found = {}
        for i, path in enumerate(paths):
            file = MappedFile(path)
            stack.callback(file.close)
            container.files.append(file)
            is_gguf, tensors, own = _read(file)
            container = container._replace(is_gguf=container.is_gguf or is_gguf)
            if is_gguf:
                own = check_split(path, own, i, len(paths))
            _add(container, tensors, own)
            found[path.name] = tensors
        if index is not None:
            check_index(where, index, found)
        # Success: leave the files open.
        stack.pop_all()
    return container


def _read(file):
    start = file.start(9)
    try:
        if start.startswith(gguf_magic):
            return True, *read_gguf_header(file)
        if starts_safetensors(start):
            return False, *read_safetensors(file)
        raise ValueError(
            "it is neither of safetensors nor of GGUF, or only the beginning of one. "
            "Files of other kinds may run code when they are read: convert them first."
        )
    except ValueError as e:
        raise ValueError(f"Could not open {file.path!r}: {e}") from e


def _add(container, tensors, metadata):
    for name, tensor in tensors.items():
        if name in container.tensors:
            other = container.tensors[name].path
            raise ValueError(
                f"{tensor.path!r} and {other!r} both have a tensor {short(name)}."
            )
        container.tensors[name] = tensor
    for key, value in metadata.items():
        container.metadata.setdefault(key, value)


# The names of configurations. Older quantized models have the last two.
_names = ("config.json", "quantize_config.json", "quant_config.json")


def config_names(path: pathlib.Path) -> tuple[str, ...]:
    """Returns the possible names of the configuration of a file. The first belongs to
    this file alone."""
    return f"{path.stem}.config.json", *_names


def config_beside(path: pathlib.Path) -> Callable[[], dict[str, Any]]:
    """Returns a function that reads the configuration from a JSON file next to a model,
    if there is one. It is read on the first call, since not every model needs it. The
    function raises a `ValueError` if the configuration is damaged."""
    for name in config_names(path):
        beside = path.with_name(name)
        if beside.is_file():
            return ft.cache(ft.partial(read_json, beside))
    return dict
