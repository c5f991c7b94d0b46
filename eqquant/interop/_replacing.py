import contextlib
import os
import stat
from collections.abc import Iterator

from ._files import remove, replace, sync


def temporary_path(path: str | os.PathLike[str], token: str) -> str:
    """Returns the path of the temporary file of [`replacing`][]."""
    # For a symbolic link, next to its target.
    folder = os.path.dirname(os.path.realpath(path))
    return os.path.join(folder, f".eqquant-{token}.tmp")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], token: str) -> Iterator[str]:
    """Yields the path of a temporary file, which replaces the file at `path` at the
    end. If anything fails, it is removed, and the file at `path` is unchanged. Its name
    contains `token`, which should be unique. Raises an `OSError` that names the folder,
    if no file can be created there; and an `IsADirectoryError` if `path` is a folder.
    """
    temporary = temporary_path(path, token)
    if os.path.isdir(path):
        raise IsADirectoryError(
            f"`path` should be the path of a file. Got {os.fspath(path)}, a folder."
        )
    _check_folder(path)
    path = os.path.realpath(path)
    try:
        with open(temporary, "xb"):
            # A new file has the permissions that the umask leaves.
            mode = os.stat(path if os.path.exists(path) else temporary).st_mode
    except OSError as e:
        text = f"{e.strerror} (while creating a file in this folder)"
        raise OSError(e.errno, text, os.path.dirname(path)) from e
    try:
        with naming(path):
            yield temporary
        sync(temporary)
        os.chmod(temporary, stat.S_IMODE(mode))
        replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the name of the file to errors. Errors of writing to an open file, such as
    on a full disk, lack it."""
    try:
        yield
    except OSError as e:
        if e.filename is not None or e.errno is None:
            raise
        raise OSError(e.errno, f"{e.strerror} (while writing)", os.fspath(path)) from e


def _check_folder(path: str | os.PathLike[str]) -> None:
    """Checks that a file can be created at `path`. Raises a `FileNotFoundError` if its
    folder does not exist, a `NotADirectoryError` if the folder is a file, and a
    `PermissionError` if it is not writable."""
    folder = os.path.dirname(os.path.realpath(path))
    _check(path, folder)
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"`path` is {os.fspath(path)!r}, and there is no folder {folder!r}. Create "
            "it first, for example by `os.makedirs`."
        )


def make_folder(path: str | os.PathLike[str]) -> None:
    """Creates the folder of a file at `path`, if it does not exist. Raises a
    `NotADirectoryError` or a `PermissionError`, as in [`replacing`][]."""
    folder = os.path.dirname(os.path.realpath(path))
    _check(path, folder)
    os.makedirs(folder, exist_ok=True)


def _check(path, folder):
    # Checks the folder, or its nearest parent that exists.
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise NotADirectoryError(
            f"`path` is {os.fspath(path)!r}, and {folder!r} is not a folder."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"`path` is {os.fspath(path)!r}, and {folder!r} is not writable."
        )
