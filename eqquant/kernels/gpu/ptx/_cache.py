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
def ptx_of(source: str, capability: int) -> str:
    """Returns the PTX of a program that includes the `headers`, with registers for a
    GPU of a compute capability (times ten). It is compiled once, and kept in the user's
    cache on disk for other processes."""
    about = (source, capability, *headers().items(), nvrtc.version())
    path = _folder() / f"{hashlib.sha256(repr(about).encode()).hexdigest()}.ptx"
    found = _read(path)
    if found is None:
        found = nvrtc.compile_ptx(source, headers(), _bound(source, capability))
        _write(path, found)
    return found


# A program leaves open for how many blocks of threads a multiprocessor should have
# room, which limits the registers of a thread. Two keep a GPU's memory busy (see
# `_plan.py`). Zero leaves the number to the compiler, which then uses fewer registers
# than with one, but sometimes too few.
_blocks = (2, 0, 1)


def _bound(source, capability):
    """Returns the first of these numbers with which no registers are spilled, or the
    last of them, as an option of the compiler."""
    options = [[f"-DBLOCKS={number}"] for number in _blocks]
    spilled = lambda option: nvrtc.spilled(source, headers(), option, capability)
    return next((each for each in options if spilled(each) == 0), options[-1])


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
