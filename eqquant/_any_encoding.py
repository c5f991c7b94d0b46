import codecs
import contextlib
import io
import sys
from collections.abc import Iterator


# What is printed where an encoding lacks a character.
_others = {"─": "-", "→": "->", "×": "x", "…": "...", "━": "=", "╸": "-", "–": "-"}
_others |= {"±": "+-", "µ": "u"}


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


def encodable(text: str) -> str:
    """Text that standard output takes, whatever its encoding is."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "eqquant").decode(encoding)
