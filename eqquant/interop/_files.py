"""The differences between operating systems in handling files. Windows has no `pread`,
cannot open folders, and neither replaces nor removes files that a program has open or
mapped into memory. Each function here tests for the system's call that it needs; no
other file of this room depends on the system."""

import abc
import errno
import mmap
import os
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np


class ReadOnly(abc.ABC):
    """A file that several threads may read at once, at any position."""

    @abc.abstractmethod
    def size(self) -> int:
        """Returns the current size of the file in bytes."""

    @abc.abstractmethod
    def read(self, start: int, size: int) -> bytes:
        """Reads a part of the file, which is shorter at the end of the file."""

    @abc.abstractmethod
    def map(self, start: int, size: int, kept: bool) -> np.ndarray:
        """Returns a part of the file as a read-only array of bytes. This is a memory
        map if the array is not `kept`, or if a map does not keep the file from being
        replaced. Raises a `ValueError` if the file was changed so that it cannot be
        read."""

    @abc.abstractmethod
    def close(self) -> None: ...


def read_only(path: str | os.PathLike[str]) -> ReadOnly:
    """Opens a file for reading."""
    return _Held(path) if hasattr(os, "pread") else _Reopened(path)


class _Held(ReadOnly):
    """Stays open, and reads the same file even after another replaces it."""

    def __init__(self, path: str | os.PathLike[str]):
        self._file = open(path, "rb", buffering=0)

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read(self, start: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, start)

    def map(self, start: int, size: int, kept: bool) -> np.ndarray:
        return _mapped(self._file, start, size)

    def close(self) -> None:
        self._file.close()


class _Reopened(ReadOnly):
    """Opens the file anew for each part, so that it can be replaced in between. Detects
    that, so that parts of two files are never mixed."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = os.path.abspath(path)
        with open(self._path, "rb", buffering=0) as file:
            self._state = _state(file)

    def size(self) -> int:
        return os.stat(self._path).st_size

    def read(self, start: int, size: int) -> bytes:
        with self._opened() as file:
            return np.fromfile(file, np.uint8, size, offset=start).tobytes()

    def map(self, start: int, size: int, kept: bool) -> np.ndarray:
        with self._opened() as file:
            if not kept:
                return _mapped(file, start, size)
            data = np.fromfile(file, np.uint8, size, offset=start)
        if data.size < size:
            raise ValueError(f"{self._path!r} was cut short since it was opened.")
        data.flags.writeable = False
        return data

    def close(self) -> None:
        pass

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        with open(self._path, "rb", buffering=0) as file:
            if _state(file) != self._state:
                raise ValueError(f"{self._path!r} was changed since it was opened.")
            yield file


def _state(file):
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _mapped(file, start, size):
    before = start % mmap.ALLOCATIONGRANULARITY
    data = mmap.mmap(
        file.fileno(), before + size, access=mmap.ACCESS_READ, offset=start - before
    )
    return np.frombuffer(data, np.uint8, size, before)


def sync(path: str | os.PathLike[str]) -> None:
    """Waits until a file is on disk."""
    # Windows synchronizes only files that are open for writing.
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Waits until the entries of a folder are on disk, where folders can be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Renames a file, or a folder, to the place of a file or an empty folder. Raises a
    `PermissionError` that names `target` if the system does not allow it."""
    if os.path.isdir(source) and os.path.isdir(target):
        os.rmdir(target)
    try:
        os.replace(source, target)
    except PermissionError as e:
        text = f"{e.strerror} (is it open in a program, or read-only?)"
        raise PermissionError(e.errno, text, os.fspath(target)) from e


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a file if it exists, even if it is read-only."""
    try:
        pathlib.Path(path).unlink(missing_ok=True)
    except PermissionError:
        os.chmod(path, 0o600)
        os.unlink(path)


def remove_locked(file: IO[bytes], path: pathlib.Path) -> None:
    """Closes a locked file, and removes it with its folder. Where the system allows it,
    the file is removed before its lock is released."""
    try:
        path.unlink()
    except PermissionError:
        pass
    file.close()
    shutil.rmtree(path.parent)


def lock(file: IO[bytes]) -> None:
    """Locks a file against other processes, until it is closed. Raises a
    `BlockingIOError` if another process has it locked."""
    try:
        import fcntl
    except ImportError:
        _lock_a_byte(file)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Windows lets no other process read a locked byte, so this one lies past the end.
_locked = 2**31 - 2


def _lock_a_byte(file):
    import msvcrt

    file.seek(_locked)
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore
    except PermissionError as e:
        raise BlockingIOError(errno.EAGAIN, "The file is locked") from e
