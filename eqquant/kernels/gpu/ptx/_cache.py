import functools as ft
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Mapping

from . import _nvrtc as nvrtc


@ft.cache
def headers() -> Mapping[str, str]:
    """Returns the text of each source that programs include, by file name."""
    folder = pathlib.Path(__file__).parent / "src"
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.cuh"))}


@ft.cache
def ptx_of(source: str) -> str:
    """Returns the PTX of a program that includes the `headers`. It is compiled once,
    and kept in the user's cache on disk for other processes."""
    about = (source, *headers().items(), nvrtc.version())
    path = _folder() / f"{hashlib.sha256(repr(about).encode()).hexdigest()}.ptx"
    found = _read(path)
    if found is None:
        found = nvrtc.compile_ptx(source, headers())
        _write(path, found)
    return found


def _folder() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    root = pathlib.Path(cache) if cache else pathlib.Path("~/.cache").expanduser()
    return root / "eqquant" / "ptx"


# The first line of a file is the digest of the rest, so truncated files are not used.


def _read(path):
    try:
        line, text = path.read_text("utf-8").split("\n", 1)
    except (OSError, ValueError):
        return None
    return text if line == _line(text) else None


def _write(path, text):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as file:
            file.write(f"{_line(text)}\n{text}")
        os.replace(file.name, path)
    except OSError:
        return  # Without the file, the next process compiles again.


def _line(text):
    return f"// {hashlib.sha256(text.encode()).hexdigest()}"
