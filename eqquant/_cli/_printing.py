import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator


# What is printed where an encoding lacks a character.
_others = {"─": "-", "→": "->", "×": "x", "…": "...", "━": "=", "╸": "-"}


def _replaced(error):
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    texts = [_others.get(c, ascii(c)[1:-1]) for c in lacking]
    return "".join(texts), error.end


codecs.register_error("eqquant", _replaced)


@contextlib.contextmanager
def any_encoding() -> Iterator[None]:
    """Standard output then takes any text, whatever its encoding is."""
    file = sys.stdout
    if not isinstance(file, io.TextIOWrapper):
        yield
        return
    errors = file.errors
    file.reconfigure(errors="eqquant")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.reconfigure(errors=errors)


def drop_output() -> None:
    """Forgets what could not be written to standard output, which Python would try
    once more when it exits."""
    if sys.stdout is sys.__stdout__:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
