import json
import os
import pathlib
from typing import Any, IO


class Journal:
    """What an unfinished output is of, and which arrays are written: a line of JSON for
    each. So a run that was killed at any moment can be gone on with. As long as it is
    open, no other process may open it.

    - `lines`: those of earlier runs, but for the first.
    """

    def __init__(self, path: pathlib.Path, about: dict[str, Any]):
        """**Arguments:**

        - `about`: all that the output is determined by.

        **Raises:**

        A `ValueError` if what is there is of something else, or if another process has
        it open.
        """
        self._file = open(path, "a+b", buffering=0)
        try:
            lock(self._file, path)
            self.lines = self._begin(path, about)
        except BaseException:
            self._file.close()
            raise

    def write(self, line: dict[str, Any]) -> None:
        # In one call, so that only the last line can be in part.
        self._file.write(json.dumps(line).encode() + b"\n")

    def finish(self) -> None:
        self.write(_finished)

    def close(self) -> None:
        self._file.close()

    def _begin(self, path, about):
        self._file.seek(0)
        text = self._file.read()
        # A line that does not end was being written.
        whole = text[: text.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            self.write(about)
            return []
        old, *lines = lines
        # As it is when it is read again.
        about = json.loads(json.dumps(about))
        for key in about:
            if old.get(key) != about[key]:
                raise ValueError(
                    f"{str(path.parent)!r} is what was written of another run, with "
                    f"{key} that differ. Remove it, or pass `fresh`."
                )
        return lines


_finished = {"finished": True}


def is_finished(path: pathlib.Path) -> bool:
    """Whether an output was whole, by its journal."""
    return path.read_bytes().endswith(json.dumps(_finished).encode() + b"\n")


def lock(file: IO[bytes], path: pathlib.Path) -> None:
    """Keeps other processes from writing to the folder of a journal, as long as the
    file is open."""
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise ValueError(
            f"{str(path.parent)!r} is being written by another process."
        ) from e


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
