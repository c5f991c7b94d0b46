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
# What there may be in the folder of a model, besides its tensors.
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
    """Files that are being written, in a folder beside their place: `OUT.partial`. Each
    has its header last, once all of them are whole, so that nobody takes one for what
    it is to become; and then they go to their place at once.

    - `lines`: what the journal has of those arrays that are written already.
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

        - `about`: all that the output is determined by.
        - `fresh`: whether to remove what an earlier run has left.
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
            # Only the journal was left.
            self.lines, self._shards = lines, []
            return
        for shard in shards:
            with builtins.open(self._files / shard.name, "ab") as file:
                file.truncate(shard.layout.size)
        self.lines = {k: x for k, x in lines.items() if self._is_there(x["crc32"])}

    def write(self, parts: Mapping[str, Part], line: dict[str, Any]) -> None:
        """Writes the parts of an array, and then to the journal that it has."""
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
        """Puts all to its place.

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
            # Itself last.
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
    source: pathlib.Path, config: dict[str, Any], said: dict[str, Any]
) -> dict[str, bytes]:
    """The other files of a model, by their names: the tokenizer's, as they are, and the
    configuration.

    **Arguments:**

    - `config`: of the source.
    - `said`: what it is to say instead of how arrays are quantized there.
    """
    folder = source if source.is_dir() else source.parent
    found = {
        path.name: path.read_bytes()
        for pattern in _others
        for path in sorted(folder.glob(pattern))
        if path.is_file() and path.stat().st_size <= _largest_other
    }
    config = {k: v for k, v in config.items() if k not in _sections} | said
    return found | ({"config.json": as_json(config)} if config else {})


def as_json(x: dict[str, Any]) -> bytes:
    return json.dumps(x, indent=2).encode()


def partial_path(out: pathlib.Path) -> pathlib.Path:
    """The folder where an output is, as long as it is not whole."""
    return out.with_name(f"{out.name}.partial")


def is_there(out: pathlib.Path) -> bool:
    """Whether there is something where an output is to be."""
    return any(out.iterdir()) if out.is_dir() else out.exists()


def is_placed(out: pathlib.Path) -> bool:
    """Whether that is the output itself, of a call that was interrupted after all."""
    journal = partial_path(out) / journal_name
    return is_there(out) and journal.is_file() and is_finished(journal)


def _check_own(folder):
    # The journal is the first that there is in such a folder.
    if is_there(folder) and not (folder / journal_name).is_file():
        raise FileExistsError(
            f"{str(folder)!r}, where the output is to be until it is whole, has "
            f"something else in it: there is no {journal_name!r}. Move it, or write to "
            "another place."
        )


def _discard(folder):
    journal = folder / journal_name
    with builtins.open(journal, "ab") as file:
        lock(file, journal)
        _remove(folder)


def _remove(folder):
    # The journal last, which tells whose the folder is.
    if (folder / "files").is_dir():
        shutil.rmtree(folder / "files")
    shutil.rmtree(folder)
