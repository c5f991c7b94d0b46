import os


def check_folder(path: str | os.PathLike[str]) -> None:
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

    A `NotADirectoryError` or a `PermissionError` as of [`check_folder`][].
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
