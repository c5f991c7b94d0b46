import pathlib
from collections.abc import Iterator
from typing import Any

from .._containers import read_bytes, read_json, short


class Values:
    """The values of a JSON object, checked when they are read.

    - `where`: the name of the object in messages.
    """

    def __init__(self, values: dict[str, Any], where: str):
        self._values, self.where = values, where

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, key: str) -> Any:
        """Returns a value of any kind, or `None` if there is none."""
        return self._values.get(key)

    def count(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """Returns a positive integer. Raises a `ValueError` if it is missing without a
        `default`, or if it is another value."""
        found = self._or(key, default)
        if type(found) is not int or found < 1:
            raise self.wrong(key, "a positive integer", found)
        if found > most:
            raise self.wrong(key, f"a number up to {most}", found)
        return found

    def number(self, key: str, default: float | int | None = None) -> float:
        """Returns a positive number."""
        found = self._or(key, default)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not 0 < found < 2**63:
            raise self.wrong(key, "a positive number", found)
        return float(found)

    def flag(self, key: str, default: bool) -> bool:
        found = self._or(key, default)
        if type(found) is not bool:
            raise self.wrong(key, "true or false", found)
        return found

    def text(self, key: str) -> str:
        found = self.get(key)
        if not isinstance(found, str):
            raise self.wrong(key, "text", found)
        return found

    def items(self, key: str) -> list[Any]:
        """Returns a list, which is empty if there is none."""
        found = self._or(key, [])
        if not isinstance(found, list):
            raise self.wrong(key, "a list", found)
        return found

    def objects(self, key: str) -> list["Values"]:
        """Returns a list of JSON objects, which is empty if there is none."""
        found = self.items(key)
        for x in found:
            if not isinstance(x, dict):
                raise self.wrong(key, "objects", x)
        return [Values(x, f"{key!r} of {self.where}") for x in found]

    def below(self, key: str) -> "Values":
        """Returns a JSON object, which is empty if there is none."""
        found = self._or(key, {})
        if not isinstance(found, dict):
            raise self.wrong(key, "an object", found)
        return Values(found, f"{key!r} of {self.where}")

    def wrong(self, key: str, wanted: str, found: Any) -> ValueError:
        """Returns the error for a value that is missing or invalid."""
        got = "It has none" if found is None else f"Got {short(found)}"
        return ValueError(f"{self.where} should have {wanted} for {key!r}. {got}.")

    def _or(self, key: str, default: Any) -> Any:
        found = self._values.get(key)
        return default if found is None else found


def read_values(path: pathlib.Path) -> Values | None:
    """Reads the JSON object in a file. Returns `None` if there is no such file. Raises
    a `ValueError` if it is too large, or not a JSON object."""
    return Values(read_json(path), repr(str(path))) if path.is_file() else None


def read_if_there(path: pathlib.Path) -> bytes | None:
    """Reads a file of moderate size. Returns `None` if there is no such file."""
    return read_bytes(path) if path.is_file() else None
