import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator


def temporary_path(path: str | os.PathLike[str], token: str) -> str:
    """Where [`replacing`][] has its temporary file."""
    # Of a symbolic link, beside the file that it leads to.
    folder = os.path.dirname(os.path.realpath(path))
    return os.path.join(folder, f".eqquant-{token}.tmp")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], token: str) -> Iterator[str]:
    """The path of a temporary file that, at the end, takes the place of the file at
    `path`. If anything fails then it is removed, and what was there is left as it was.
    Its name is made of the token, which should be a new one.

    **Raises:**

    An `OSError` that names the folder, if nothing can be made there; and an
    `IsADirectoryError` if there is a folder in its place.
    """
    temporary = temporary_path(path, token)
    if os.path.isdir(path):
        raise IsADirectoryError(
            f"`path` should be that of a file. Got {os.fspath(path)}, a folder."
        )
    _check_folder(path)
    path = os.path.realpath(path)
    try:
        with open(temporary, "xb"):
            # It has the permissions that the umask leaves.
            mode = os.stat(path if os.path.exists(path) else temporary).st_mode
    except OSError as e:
        text = f"{e.strerror} (while making a file in this folder)"
        raise OSError(e.errno, text, os.path.dirname(path)) from e
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


def _check_folder(path: str | os.PathLike[str]) -> None:
    """Checks that a file can be made at `path`, as far as its folder tells.

    **Raises:**

    A `FileNotFoundError` if there is no such folder, a `NotADirectoryError` if it is
    none, and a `PermissionError` if nothing may be made in it.
    """
    folder = os.path.dirname(os.path.realpath(path))
    _check(path, folder)
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"`path` is {os.fspath(path)!r}, and there is no folder {folder!r}. Make "
            "it first, as by `os.makedirs`."
        )


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes the folder that a file at `path` is to be in, if there is none.

    **Raises:**

    A `NotADirectoryError` or a `PermissionError` as of [`replacing`][].
    """
    folder = os.path.dirname(os.path.realpath(path))
    _check(path, folder)
    os.makedirs(folder, exist_ok=True)


def _check(path, folder):
    # Of the folder, or of the nearest above it that is there.
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise NotADirectoryError(
            f"`path` is {os.fspath(path)!r}, and {folder!r} is not a folder."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"`path` is {os.fspath(path)!r}, and nothing may be made in {folder!r}."
        )
