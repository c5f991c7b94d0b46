import contextlib
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """The path of a temporary file that, at the end, takes the place of the file at
    `path`. If anything fails then it is removed, and what was there is left as it was.
    """
    # Of a symbolic link, the file that it leads to.
    path = os.path.realpath(path)
    if os.path.isdir(path):
        raise IsADirectoryError(
            f"`path` should be that of a file. Got {path}, a folder."
        )
    name = f".eqquant-{secrets.token_hex(8)}.tmp"
    temporary = os.path.join(os.path.dirname(path), name)
    with open(temporary, "xb"):
        # It has the permissions that the umask leaves.
        mode = os.stat(path if os.path.exists(path) else temporary).st_mode
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        # The block may have made another file of it.
        os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise
