"""A system that is like Windows, as to files: what Windows lacks is hidden, and what it
refuses raises its errors."""

import errno
import fcntl
import os
import pathlib
import shutil
import stat
import sys
import types

import pytest


_lacking = (
    *("pread", "preadv", "pwrite", "sched_getaffinity", "sched_setaffinity", "sysconf"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "fchmod", "geteuid"),
)


def emulate(patch: pytest.MonkeyPatch) -> None:
    for name in _lacking:
        patch.delattr(os, name)
    for name in ("fcntl", "resource", "pwd"):
        patch.setitem(sys.modules, name, None)
    patch.setitem(
        sys.modules, "msvcrt", types.SimpleNamespace(locking=_locking, **_modes)
    )
    patch.setattr(shutil, "_use_fd_functions", False)
    patch.setattr(pathlib.Path, "is_mount", _unsupported)
    for name in ("open", "fsync", "replace", "rename", "unlink"):
        patch.setattr(os, name, globals()[f"_{name}"](getattr(os, name)))
    patch.setattr(os, "remove", os.unlink)


def _unsupported(*args):
    raise NotImplementedError("This system cannot do that")


def _refuse(code, text, *paths):
    raise PermissionError(code, text, *map(os.fspath, paths))


def _open(call):
    def opened(path, flags, *args, **kwargs):
        if os.path.isdir(path):
            _refuse(errno.EACCES, "Permission denied", path)
        return call(path, flags, *args, **kwargs)

    return opened


def _fsync(call):
    def synchronized(file):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        call(file)

    return synchronized


def _replace(call):
    def replaced(source, target):
        for path in (source, target):
            _check_free(path)
        if os.path.isdir(target):
            _refuse(errno.EACCES, "Access is denied", target)
        _check_writable(target)
        call(source, target)

    return replaced


def _rename(call):
    def renamed(source, target):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "It already exists", os.fspath(target))
        _check_free(source)
        call(source, target)

    return renamed


def _unlink(call):
    def unlinked(path, **kwargs):
        _check_free(path)
        _check_writable(path)
        call(path, **kwargs)

    return unlinked


def _check_free(path):
    path = os.path.realpath(path)
    for used in [*_opened(), *_mapped()]:
        if used == path or used.startswith(path + os.sep):
            _refuse(errno.EACCES, "It is being used by another process", path)


def _check_writable(path):
    if os.path.isfile(path) and not os.stat(path).st_mode & stat.S_IWUSR:
        _refuse(errno.EACCES, "Access is denied", path)


def _opened():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            pass


def _mapped():
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            yield fields[-1]


_modes = {"LK_NBLCK": 2}


def _locking(file, mode, size):
    # Of a byte that nobody reads or writes: its lock is not only for those who ask.
    position = os.lseek(file, 0, os.SEEK_CUR)
    assert os.fstat(file).st_size < 2**30 < position < 2**31
    assert (mode, size) == (2, 1)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _refuse(errno.EACCES, "Permission denied")
