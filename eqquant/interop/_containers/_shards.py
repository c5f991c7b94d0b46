import pathlib
import re
from collections.abc import Iterable

from ._file import MappedFile, short
from ._json import parse


index_suffix = ".safetensors.index.json"
# In the folder of an unfinished output.
journal_name = "eqquant.journal"
# A tensor takes about 100 bytes of the index.
_largest_index = 32 * 2**20
_most = 1 / 40
_most_shards = 10_000
_split = re.compile(r"(?P<stem>.+)-(?P<i>\d{5})-of-(?P<n>\d{5})\.gguf")


def main_file(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of the model in a folder, or their index.

    **Raises:**

    A `ValueError` if there is no model, or more than one, or if it is unfinished.
    """
    if (folder / journal_name).is_file():
        raise ValueError(
            f"{str(folder)!r} is the unfinished output of `eqquant quantize`. Run that "
            "again to finish it."
        )
    indices = sorted(folder.glob(f"*{index_suffix}"))
    usual = [path for path in indices if path.name == f"model{index_suffix}"]
    if len(usual or indices) == 1:
        return usual or indices
    if len(indices) > 1:
        raise ValueError(_which(folder, indices))
    tensors = sorted(folder.glob("*.safetensors"))
    # A folder may have the model once more, in several files.
    whole = [path for path in tensors if path.name == "model.safetensors"]
    if tensors:
        return whole or tensors
    ggufs = sorted(folder.glob("*.gguf"))
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
    """All files of a split GGUF model, given one of them; otherwise the file."""
    found = _split.fullmatch(path.name)
    if found is None:
        return [path]
    number = int(found["n"])
    if not 1 <= number <= _most_shards:
        raise ValueError(f"{str(path)!r} should be one of 1 to {_most_shards} files.")
    names = [
        f"{found['stem']}-{i:05}-of-{number:05}.gguf" for i in range(1, number + 1)
    ]
    return [path.with_name(name) for name in names]


def read_index(path: pathlib.Path) -> tuple[dict[str, str], dict[str, str]]:
    """The name of the file of each tensor, from the index of several files, and the
    text in the metadata of the index.

    **Raises:**

    A `ValueError` if it is not an index, or names files outside its folder.
    """
    file = MappedFile(path)
    if file.size > _largest_index:
        file.close()
        raise ValueError(f"{str(path)!r} should have {_largest_index} bytes at most.")
    text = file.start(file.size)
    file.close()
    content = parse(text, repr(str(path)), _most)
    found, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(found, dict) or not all(
        isinstance(name, str) for name in found.values()
    ):
        raise ValueError(f"{str(path)!r} should have a `weight_map` of names of files.")
    for tensor, name in found.items():
        # On any system, not a path.
        if not name or name in (".", "..") or set(name) & set("/\\:\0"):
            raise ValueError(
                f"{str(path)!r} should have files of its own folder. Got "
                f"{short(name)}, for {short(tensor)}."
            )
    if not 1 <= len(set(found.values())) <= _most_shards:
        raise ValueError(f"{str(path)!r} should have 1 to {_most_shards} files.")
    metadata = metadata if isinstance(metadata, dict) else {}
    return found, {k: v for k, v in metadata.items() if isinstance(v, str)}


def check_index(
    path: pathlib.Path, index: dict[str, str], found: dict[str, Iterable[str]]
) -> None:
    """Checks that files have the tensors of their index.

    **Arguments:**

    - `path`: of the index.
    - `index`: as `read_index` returns it.
    - `found`: the tensors of each file, by its name.
    """
    sets = {name: set(tensors) for name, tensors in found.items()}
    for tensor, name in index.items():
        if tensor not in sets[name]:
            raise ValueError(
                f"{str(path)!r} has {short(tensor)} in {name!r}, which has no such "
                "tensor."
            )


def _part(path):
    found = _split.fullmatch(path.name)
    return None if found is None else int(found["i"])


def _which(folder, paths):
    names = ", ".join(repr(path.name) for path in paths)
    return f"{str(folder)!r} has several models: {names}. Open one of them."
