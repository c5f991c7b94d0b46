import builtins
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .._containers import journal_name, Part, TensorFile
from .._files import remove_locked, replace, sync, sync_folder
from .._replacing import make_folder, naming
from .._replacing_model import without_quantization
from ._journal import is_finished, Journal, lock_journal
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


class Output:
    """Writes files in the folder `OUT.partial`. Headers are written after all tensors,
    so that no unfinished file can be opened. Then the files are renamed into place at
    once.

    - `lines`: the lines of the journal for the arrays that are written already.
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

        - `out`, `is_file`: the output, and whether it is a file instead of a folder.
        - `shards`: the files to write.
        - `about`: everything that determines the output.
        - `fresh`: whether to remove the unfinished output of an earlier run.
        """
        self._out, self._is_file, self._shards = out, is_file, shards
        self._folder = _partial_path(out)
        self._files = self._folder / "files"
        _check_own(self._folder)
        if fresh and _is_there(self._folder):
            _discard(self._folder)
        make_folder(out)
        self._folder.mkdir(exist_ok=True)
        self._journal = Journal(self._folder / journal_name, about)
        self._files.mkdir(exist_ok=True)
        self._owners = {key: shard for shard in shards for key in shard.parts}
        self._wrote = self._has_failed = False
        lines = {x["name"]: x for x in self._journal.lines if "name" in x}
        if _is_placed(out):
            # An earlier run was interrupted after the renaming.
            self.lines, self._shards = lines, []
            return
        for shard in shards:
            with builtins.open(self._files / shard.name, "ab") as file:
                file.truncate(shard.layout.size)
        self.lines = {k: x for k, x in lines.items() if self._is_there(x["crc32"])}

    def write(self, parts: Mapping[str, Part], line: dict[str, Any]) -> None:
        """Writes the tensors of an array, then its line in the journal."""
        checksums = {}
        for key, part in parts.items():
            x = np.ascontiguousarray(part.make())
            checksums[key] = zlib.crc32(x.reshape(-1).view(np.uint8).data)
            shard = self._owners[key]
            path = self._files / shard.name
            with naming(path):
                with TensorFile(path, shard.parts, shard.layout, resume=True) as file:
                    file.write(key, x)
        self._journal.write({**line, "crc32": checksums})
        self._wrote = True

    def finish(self, beside: Mapping[str, bytes]) -> None:
        """Moves all files into place, and those in `beside`, by their names."""
        if self._shards:
            self._place(beside)
        _remove(self._folder, self._journal.file)

    def _place(self, beside):
        for shard in self._shards:
            with builtins.open(self._files / shard.name, "r+b") as file:
                file.write(shard.layout.header)
        for name, data in beside.items():
            (self._files / name).write_bytes(data)
        for path in self._files.iterdir():
            sync(path)
        sync_folder(self._files)
        self._journal.finish()
        if self._is_file:
            # Rename the output last.
            for name in beside:
                replace(self._files / name, self._out.with_name(name))
            replace(self._files / self._shards[0].name, self._out)
        else:
            replace(self._files, self._out)
        sync_folder(self._out.parent)

    def fail(self) -> None:
        """Marks the output as not worth resuming: the same call would fail again."""
        self._has_failed = True

    def close(self) -> None:
        self._journal.close()

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, type: type[BaseException] | None, *args: object) -> None:
        has_lines = (self.lines or self._wrote) and not self._has_failed
        if type is not None and not has_lines:
            _remove(self._folder, self._journal.file)
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
    source: pathlib.Path, config: Mapping[str, Any], quantization: dict[str, Any]
) -> dict[str, bytes]:
    """Returns the other files of a model, by their names: the tokenizer's files,
    unchanged, and the configuration. The entries of `quantization` replace the ones
    about the model's quantization."""
    folder = source if source.is_dir() else source.parent
    found = {
        path.name: path.read_bytes()
        for pattern in _others
        for path in sorted(folder.glob(pattern))
        if path.is_file() and path.stat().st_size <= _largest_other
    }
    config = without_quantization(config) | quantization
    return found | ({"config.json": as_json(config)} if config else {})


def as_json(x: dict[str, Any]) -> bytes:
    return json.dumps(x, indent=2).encode()


def check_out(out: pathlib.Path, fresh: bool) -> None:
    """Checks that an output can be written. Raises a `FileExistsError` if `out` already
    exists, and a `ValueError` if no folder can be renamed to `out`."""
    if not out.name or os.path.ismount(out):
        raise ValueError(
            f"`out` should be inside a disk. Got {str(out)!r}, the root of a disk: "
            "name a new folder in it."
        )
    if _is_there(out) and (fresh or not _is_placed(out)):
        raise FileExistsError(f"{str(out)!r} already exists.")


def check_others(out: pathlib.Path, names: Iterable[str]) -> None:
    """Checks that the files next to an output file do not exist yet. Raises a
    `FileExistsError` if one of them exists."""
    if _is_finished(out):
        # These are files of an earlier run that was interrupted while it renamed them.
        return
    for name in names:
        if os.path.lexists(out.with_name(name)):
            raise FileExistsError(
                f"{str(out.with_name(name))!r} already exists, and goes with "
                f"{out.name!r}."
            )


def _partial_path(out):
    return out.with_name(f"{out.name}.partial")


def _is_there(out):
    return any(out.iterdir()) if out.is_dir() else os.path.lexists(out)


def _is_finished(out):
    journal = _partial_path(out) / journal_name
    return journal.is_file() and is_finished(journal)


def _is_placed(out):
    # Whether `out` is the complete output of a run that was interrupted before it
    # returned.
    return _is_there(out) and _is_finished(out)


def _check_own(folder):
    # The journal is created first in such a folder.
    if _is_there(folder) and not (folder / journal_name).is_file():
        raise FileExistsError(
            f"{str(folder)!r}, the folder for unfinished output, has other files: "
            f"there is no {journal_name!r} in it. Move them, or choose another `out`."
        )


def _discard(folder):
    journal = folder / journal_name
    with builtins.open(journal, "ab") as file:
        lock_journal(file, journal)
        _remove(folder, file)


def _remove(folder, journal):
    # Remove the journal last, since it marks the folder as ours.
    if (folder / "files").is_dir():
        shutil.rmtree(folder / "files")
    remove_locked(journal, folder / journal_name)
