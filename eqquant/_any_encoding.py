import codecs
import contextlib
import io
import sys
from collections.abc import Iterator


# Replacements for characters that an encoding lacks.
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
    """Makes standard output accept any text, whatever its encoding is."""
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
    """Returns `text` with the characters replaced that standard output cannot
    encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "eqquant").decode(encoding)
