import builtins
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._containers import journal_name, Part, TensorFile
from .._replacing import make_folder
from ._journal import is_finished, Journal, lock, sync
from ._shards import Shard


_chunk = 2**24
# Files in the folder of a model, besides its tensors.
_others = (
    "added_tokens.json",
    "chat_template.*",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab*",
)
_largest_other = 2**26
_sections = ("quantization_config", "quantization")


class Output:
    """Files that are being written, in the folder `OUT.partial`. Their headers are
    written last, once all tensors are, so that no unfinished file can be opened. Then
    they are renamed into place at once.

    - `lines`: those of the journal, for the arrays that are written already.
    """

    def __init__(
        self,
        out: pathlib.Path,
        is_file: bool,
        shards: list[Shard],
        about: dict[str, Any],
        fresh: bool,
    ):
        """**Arguments:**

        - `out`, `is_file`: the output, and whether it is a file, or else a folder.
        - `shards`: the files.
        - `about`: everything that determines the output.
        - `fresh`: whether to remove the unfinished output of an earlier run.
        """
        self._out, self._is_file, self._shards = out, is_file, shards
        self._folder = partial_path(out)
        self._files = self._folder / "files"
        _check_own(self._folder)
        if fresh and is_there(self._folder):
            _discard(self._folder)
        make_folder(out)
        self._folder.mkdir(exist_ok=True)
        self._journal = Journal(self._folder / journal_name, about)
        self._files.mkdir(exist_ok=True)
        self._owners = {key: shard for shard in shards for key in shard.parts}
        lines = {x["name"]: x for x in self._journal.lines if "name" in x}
        if is_placed(out):
            # An earlier run was interrupted after the renaming.
            self.lines, self._shards = lines, []
            return
        for shard in shards:
            with builtins.open(self._files / shard.name, "ab") as file:
                file.truncate(shard.layout.size)
        self.lines = {k: x for k, x in lines.items() if self._is_there(x["crc32"])}

    def write(self, parts: Mapping[str, Part], line: dict[str, Any]) -> None:
        """Writes the tensors of an array, and then its line to the journal."""
        checksums = {}
        for key, part in parts.items():
            x = np.ascontiguousarray(part.make())
            checksums[key] = zlib.crc32(x.reshape(-1).view(np.uint8).data)
            shard = self._owners[key]
            path = self._files / shard.name
            with TensorFile(path, shard.parts, shard.layout, resume=True) as file:
                file.write(key, x)
        self._journal.write({**line, "crc32": checksums})

    def finish(self, beside: Mapping[str, bytes]) -> None:
        """Moves all files into place.

        **Arguments:**

        - `beside`: other files, by their names.
        """
        if self._shards:
            self._place(beside)
        self.close()
        _remove(self._folder)

    def _place(self, beside):
        for shard in self._shards:
            with builtins.open(self._files / shard.name, "r+b") as file:
                file.write(shard.layout.header)
        for name, data in beside.items():
            (self._files / name).write_bytes(data)
        for path in self._files.iterdir():
            sync(path)
        sync(self._files)
        self._journal.finish()
        if self._is_file:
            # The output last.
            for name in beside:
                os.replace(self._files / name, self._out.with_name(name))
            os.replace(self._files / self._shards[0].name, self._out)
        else:
            os.replace(self._files, self._out)
        sync(self._out.parent)

    def close(self) -> None:
        self._journal.close()

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_there(self, checksums):
        return all(self._checksum(key) == crc for key, crc in checksums.items())

    def _checksum(self, key):
        if key not in self._owners:
            return None
        shard = self._owners[key]
        left, found = shard.parts[key].nbytes, 0
        with builtins.open(self._files / shard.name, "rb") as file:
            file.seek(shard.layout.starts[key])
            while left > 0:
                data = file.read(min(left, _chunk))
                left -= len(data)
                found = zlib.crc32(data, found)
        return found


def beside(
    source: pathlib.Path, config: dict[str, Any], quantization: dict[str, Any]
) -> dict[str, bytes]:
    """The other files of a model, by their names: those of the tokenizer, unchanged,
    and the configuration.

    **Arguments:**

    - `source`: the path of the model.
    - `config`: its configuration.
    - `quantization`: the entries that replace those about its quantization.
    """
    folder = source if source.is_dir() else source.parent
    found = {
        path.name: path.read_bytes()
        for pattern in _others
        for path in sorted(folder.glob(pattern))
        if path.is_file() and path.stat().st_size <= _largest_other
    }
    config = {k: v for k, v in config.items() if k not in _sections} | quantization
    return found | ({"config.json": as_json(config)} if config else {})


def as_json(x: dict[str, Any]) -> bytes:
    return json.dumps(x, indent=2).encode()


def partial_path(out: pathlib.Path) -> pathlib.Path:
    """The folder of an unfinished output."""
    return out.with_name(f"{out.name}.partial")


def is_there(out: pathlib.Path) -> bool:
    """Whether an output, or anything else, is at `out`."""
    return any(out.iterdir()) if out.is_dir() else out.exists()


def is_placed(out: pathlib.Path) -> bool:
    """Whether it is the whole output, of a run interrupted before it returned."""
    journal = partial_path(out) / journal_name
    return is_there(out) and journal.is_file() and is_finished(journal)


def _check_own(folder):
    # The journal is created first in such a folder.
    if is_there(folder) and not (folder / journal_name).is_file():
        raise FileExistsError(
            f"{str(folder)!r}, the folder for unfinished output, has other files: "
            f"there is no {journal_name!r} in it. Move them, or choose another `out`."
        )


def _discard(folder):
    journal = folder / journal_name
    with builtins.open(journal, "ab") as file:
        lock(file, journal)
        _remove(folder)


def _remove(folder):
    # The journal last, since it marks the folder as ours.
    if (folder / "files").is_dir():
        shutil.rmtree(folder / "files")
    shutil.rmtree(folder)
