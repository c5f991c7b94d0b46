import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ._file import short
from ._json import read_json


index_suffix = ".safetensors.index.json"
# The name of the journal in the folder of unfinished output.
journal_name = "eqquant.journal"
# The suffix of a configuration while the files of its model are replaced.
_set_aside = ".replaced"
_most_shards = 10_000
# Windows treats these names as devices, with or without a suffix. It also drops dots
# and spaces at the end of a name.
_device = re.compile(
    r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[0-9¹²³]) *(\..*)?", re.IGNORECASE
)
_split = re.compile(
    r"(?P<stem>.+)-(?P<i>\d{5})-of-(?P<n>\d{5})\.(?P<suffix>gguf|safetensors)"
)


def main_file(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of the model in a folder, or their index. Raises a `ValueError`
    if there is no model, or more than one, or if it is unfinished.
    Raises a `FileNotFoundError` if files are missing, as the names of the others show.
    """
    if (folder / journal_name).is_file():
        raise ValueError(
            f"{str(folder)!r} is the unfinished output of `eqquant quantize`. Run that "
            "again to finish it."
        )
    whole = folder / "model.safetensors"
    if whole.is_file():
        # Other libraries prefer this file, too, even if the folder has an index.
        return [whole]
    indices = sorted(folder.glob(f"*{index_suffix}"))
    usual = [path for path in indices if path.name == f"model{index_suffix}"]
    if len(usual or indices) == 1:
        return usual or indices
    if len(indices) > 1:
        raise ValueError(_which(folder, indices))
    tensors = sorted(folder.glob("*.safetensors"))
    _check_complete(folder, tensors)
    if tensors:
        return tensors
    ggufs = sorted(folder.glob("*.gguf"))
    _check_complete(folder, ggufs)
    first = [path for path in ggufs if _part(path) in (None, 1)]
    if len(first) == 1:
        return first
    if len(first) > 1:
        raise ValueError(_which(folder, first))
    raise ValueError(
        f"{str(folder)!r} has no file of safetensors or GGUF. Files of other kinds, "
        "such as `pytorch_model.bin`, may run code when they are read: convert them."
    )


def parts(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files of a split model, given one of them, or else the file
    itself."""
    found = _split.fullmatch(path.name)
    if found is None:
        return [path]
    number = int(found["n"])
    if not 1 <= number <= _most_shards:
        raise ValueError(f"{str(path)!r} should be one of 1 to {_most_shards} files.")
    names = [
        f"{found['stem']}-{i:05}-of-{number:05}.{found['suffix']}"
        for i in range(1, number + 1)
    ]
    return [path.with_name(name) for name in names]


def read_index(path: pathlib.Path) -> tuple[dict[str, str], dict[str, str]]:
    """Reads the name of the file of each tensor from the index of several files, and
    the strings in the metadata of the index. Raises a `ValueError` if it is not an
    index, or names files outside its folder."""
    content = read_json(path)
    found, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(found, dict) or not all(
        isinstance(name, str) for name in found.values()
    ):
        raise ValueError(f"{str(path)!r} should have a `weight_map` of names of files.")
    for tensor, name in found.items():
        if not _is_name(name):
            raise ValueError(
                f"{str(path)!r} should have files of its own folder. Got "
                f"{short(name)}, for {short(tensor)}."
            )
    if not 1 <= len(set(found.values())) <= _most_shards:
        raise ValueError(f"{str(path)!r} should have 1 to {_most_shards} files.")
    metadata = metadata if isinstance(metadata, dict) else {}
    return found, {k: v for k, v in metadata.items() if isinstance(v, str)}


def _is_name(text):
    # Whether it is the name of a plain file on any system, and not a path.
    is_path = text.endswith((".", " ")) or set(text) & set("/\\:\0")
    return text and not is_path and _device.fullmatch(text) is None


def set_aside_path(config: pathlib.Path) -> pathlib.Path:
    """Returns the path of a configuration while the files of its model are replaced."""
    return config.with_name(f"{config.name}{_set_aside}")


def check_replaced(path: pathlib.Path, configs: Iterable[str]) -> None:
    """Checks that a file, whose configuration may have these names, does not belong to
    a model that was only partly replaced."""
    for name in configs:
        aside = set_aside_path(path.with_name(name))
        if aside.is_file():
            raise ValueError(
                f"{str(path)!r} was being replaced by another model when the process "
                f"ended: its configuration is still {aside.name!r}. Write it again."
            )


def check_index(
    path: pathlib.Path, index: dict[str, str], found: dict[str, Iterable[str]]
) -> None:
    """Checks that the files `found`, by their names, have the tensors of their index at
    `path`, as `read_index` returns it."""
    sets = {name: set(tensors) for name, tensors in found.items()}
    for tensor, name in index.items():
        if tensor not in sets[name]:
            raise ValueError(
                f"{str(path)!r} has {short(tensor)} in {name!r}, which has no such "
                "tensor."
            )


def check_split(
    path: pathlib.Path, metadata: Mapping[str, Any], i: int, number: int
) -> dict[str, Any]:
    """Checks that a GGUF file is the expected part `i`, from 0 on, of a model in
    `number` files. Returns the metadata, without the keys about splitting if there are
    several files."""
    count, which = metadata.get("split.count"), metadata.get("split.no")
    is_other = count not in (0, number) or (number > 1 and which != i)
    if count is not None and is_other:
        part = which + 1 if isinstance(which, int) else short(which)
        raise ValueError(
            f"{str(path)!r} is part {part} of the {short(count)} files of a model, by "
            f"its metadata, and part {i + 1} of {number} by its name. Get the missing "
            "files, and name them all as in 'model-00001-of-00003.gguf'."
        )
    if number == 1:
        return dict(metadata)
    return {k: v for k, v in metadata.items() if not k.startswith("split.")}


def _check_complete(folder, paths):
    there = set(paths)
    wanted = {part: None for path in paths for part in parts(path)}
    missing = [repr(part.name) for part in wanted if part not in there]
    if missing:
        more = f", and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FileNotFoundError(
            f"{str(folder)!r} should have all files of its model. Missing are "
            f"{', '.join(missing[:3])}{more}."
        )


def _part(path):
    found = _split.fullmatch(path.name)
    return None if found is None else int(found["i"])


def _which(folder, paths):
    names = ", ".join(repr(path.name) for path in paths)
    return f"{str(folder)!r} has several models: {names}. Open one of them."
