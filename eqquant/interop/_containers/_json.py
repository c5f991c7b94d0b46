import json
import re
from typing import Any

from ._file import short


# Or what is left of the text, if one does not end. (Never looked at twice.)
_string = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


def parse(text: bytes, what: str, most: float = 0.2) -> dict[str, Any]:
    """A JSON object.

    **Arguments:**

    - `most`: how many keys, and how many lists, there may be for each byte, beyond a
        few. They may take a hundred times as much memory as their text.

    **Raises:**

    A `ValueError` if it is anything else, or if an object in it has the same key twice.
    """
    outside = _string.sub(b"", text)
    keys = outside.count(b":")
    lists = outside.count(b"[") + outside.count(b"{")
    if max(keys, lists) > 1000 + most * len(text):
        raise ValueError(f"{what} should be JSON of fewer keys and lists.")
    del outside
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique)
    except _Twice as e:
        raise ValueError(f"{what} has {short(e.args[0])} twice.") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{what} is not JSON ({short(str(e))}).") from e
    if not isinstance(found, dict):
        raise ValueError(f"{what} should be a JSON object. Got {short(found)}.")
    return found


class _Twice(Exception):
    pass


def _unique(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return found
