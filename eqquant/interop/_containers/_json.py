import json
import re
from typing import Any

from ._file import short


# A string, or the rest of the text if it does not end. (Possessive, so that matching
# takes linear time.)
_string = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


def parse(text: bytes, what: str, most: float = 0.2) -> dict[str, Any]:
    """A JSON object.

    **Arguments:**

    - `text`: the JSON.
    - `what`: its name in messages.
    - `most`: the largest number of keys, and of lists, for each byte, beyond the first
        1000. These may take a hundred times the memory of their text.

    **Raises:**

    A `ValueError` if it is not a JSON object, or if an object in it has a key twice.
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
