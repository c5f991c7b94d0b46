import json
import pathlib
from typing import Any, IO

from .._containers import parse
from .._files import lock


class Journal:
    """The journal of unfinished output: a line of JSON about the run, and one for each
    array that is written, so that a killed run can be resumed. While it is open, no
    other process can open it.

    - `lines`: the lines of earlier runs, without the first.
    - `file`: the open file.
    """

    def __init__(self, path: pathlib.Path, about: dict[str, Any]):
        """Raises a `ValueError` if the journal describes another output, or if another
        process has it open. `about` is everything that determines the output."""
        self.file = open(path, "a+b", buffering=0)
        try:
            lock_journal(self.file, path)
            self.lines = self._begin(path, about)
        except BaseException:
            self.file.close()
            raise

    def write(self, line: dict[str, Any]) -> None:
        # One call per line, so that only the last line can be incomplete.
        self.file.write(json.dumps(line).encode() + b"\n")

    def finish(self) -> None:
        self.write(_finished)

    def close(self) -> None:
        self.file.close()

    def _begin(self, path, about):
        self.file.seek(0)
        text = self.file.read()
        # The last line may be incomplete.
        whole = text[: text.rfind(b"\n") + 1]
        self.file.truncate(len(whole))
        try:
            lines = [_parsed(line) for line in whole.splitlines()]
        except ValueError as e:
            raise ValueError(
                f"{str(path)!r}, the journal of unfinished output, is damaged: {e} "
                "Pass `fresh` (the option --fresh) to start over."
            ) from e
        if not lines:
            self.write(about)
            return []
        old, *lines = lines
        # Compare it as it is after a round trip through JSON.
        about = json.loads(json.dumps(about))
        for key in about:
            if old.get(key) != about[key]:
                raise ValueError(
                    f"{str(path.parent)!r} is the unfinished output of a run with "
                    f"{key} that differ. Remove it, or pass `fresh` (the option "
                    "--fresh) to start over."
                )
        return lines


_finished = {"finished": True}


def _parsed(text):
    line = parse(text, "a line of it")
    if "name" in line and not (isinstance(line.get("crc32"), dict) and "sqnr" in line):
        raise ValueError("a line of it has no checksums.")
    return line


def is_finished(path: pathlib.Path) -> bool:
    """Whether the output of a journal is complete."""
    return path.read_bytes().endswith(json.dumps(_finished).encode() + b"\n")


def lock_journal(file: IO[bytes], path: pathlib.Path) -> None:
    """Locks the folder of a journal against other processes, while `file` is open."""
    try:
        lock(file)
    except BlockingIOError as e:
        raise ValueError(
            f"{str(path.parent)!r} is being written by another process."
        ) from e
