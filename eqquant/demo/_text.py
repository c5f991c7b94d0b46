import pathlib
import sysconfig
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8


_packages = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "urllib",
    "xml",
)


class Text(NamedTuple):
    """The bytes of the modules to train on, and of the held-out modules."""

    train: UInt8[np.ndarray, " t"]
    held_out: UInt8[np.ndarray, " u"]


def standard_library() -> Text:
    """Returns the source of the interpreter's standard library. One module in sixteen
    is held out, by a hash of its name.

    **Raises:**

    A `FileNotFoundError` if there are fewer than a million bytes, for example because
    the standard library is a zip file.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    parts = ([], [])
    for name, path in _modules(root):
        held_out = zlib.crc32(name.encode()) % 16 == 0
        parts[held_out].append(path.read_bytes().replace(b"\r\n", b"\n"))
    train, held_out = map(b"".join, parts)
    if len(train) + len(held_out) < 1_000_000:
        raise FileNotFoundError(
            "The demo trains on the source of Python's standard library, and looks for "
            "its .py files in `sysconfig.get_path('stdlib')`. Got "
            f"{root}, with {len(train) + len(held_out)} bytes of source. Run the demo "
            "with a Python that was installed with its source."
        )
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8))


def windows(
    text: Integer[np.ndarray, " t"], number: int, size: int
) -> Integer[np.ndarray, "{number} {size}"]:
    """Returns windows of a text, at evenly spaced positions."""
    starts = np.linspace(0, len(text) - size, number).astype(int)
    return text[starts[:, None] + np.arange(size)[None, :]]


def _modules(root: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    paths = list(root.glob("*.py"))
    for package in _packages:
        paths.extend((root / package).rglob("*.py"))
    modules = {path.relative_to(root).as_posix(): path for path in paths}
    for name, path in sorted(modules.items()):
        # These modules differ between builds of the same version of Python.
        if not name.startswith("_sysconfig"):
            yield name, path
