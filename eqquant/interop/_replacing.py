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
    """
    temporary = temporary_path(path, token)
    path = os.path.realpath(path)
    if os.path.isdir(path):
        raise IsADirectoryError(
            f"`path` should be that of a file. Got {path}, a folder."
        )
    with open(temporary, "xb"):
        # It has the permissions that the umask leaves.
        mode = os.stat(path if os.path.exists(path) else temporary).st_mode
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise
