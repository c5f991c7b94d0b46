import hashlib
import io
import os
import pathlib
import sys

import equinox as eqx
from jaxtyping import PyTree


def folder() -> pathlib.Path:
    """Where this user's caches of this library are."""
    home = pathlib.Path.home()
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"
    elif sys.platform == "darwin":
        root = home / "Library" / "Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return pathlib.Path(root) / "eqquant"


def save(path: pathlib.Path, model: PyTree) -> None:
    """Writes the arrays of a model, after their checksum: all of them or, if this is
    interrupted, none."""
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, model)
    data = buffer.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(hashlib.sha256(data).digest() + data)
    os.replace(unfinished, path)


def load(path: pathlib.Path, like: PyTree) -> PyTree | None:
    """Reads what `save` wrote. `None` if the file is damaged."""
    content = path.read_bytes()
    checksum, data = content[:32], content[32:]
    if hashlib.sha256(data).digest() != checksum:
        return None
    return eqx.tree_deserialise_leaves(io.BytesIO(data), like)
