from collections.abc import Callable, Mapping
from typing import Any

from .._containers import Part


# The largest number of lines in an error that name arrays.
_most = 20


class NotWritable(ValueError):
    """Some arrays cannot be written.

    - `names`: the names of these arrays.
    - `pattern`: a pattern that matches the first array, and others whose names differ
        from it only in numbers.
    """

    def __init__(self, message: str, names: list[str]):
        super().__init__(message)
        self.names = names
        pattern = _starred(names[0])
        is_one = [_starred(name) for name in names].count(pattern) == 1
        self.pattern = names[0] if is_one else pattern


def parts_of_each(
    parts_of: Callable[[str, Any], dict[str, Part]], arrays: Mapping[str, Any]
) -> dict[str, dict[str, Part]]:
    """Returns the tensors of each array, by its name. Raises a `NotWritable` that lists
    all arrays that cannot be written, or a `ValueError` if two tensors would have the
    same name."""
    found: dict[str, dict[str, Part]] = {}
    problems: dict[str, ValueError] = {}
    for name, x in arrays.items():
        try:
            found[name] = parts_of(name, x)
        except ValueError as e:
            problems[name] = e
    if problems:
        names = list(problems)
        raise NotWritable(_text(problems), names) from problems[names[0]]
    owners: dict[str, str] = {}
    for name, parts in found.items():
        for key in parts:
            if key in owners:
                raise ValueError(
                    f"{name!r} and {owners[key]!r} would both be written as {key!r}."
                )
            owners[key] = name
    return found


def _text(problems):
    # Arrays whose names differ only in numbers, such as the index of a layer, share a
    # line.
    first, *others = [str(e) for e in problems.values()]
    if not others:
        return first
    groups: dict[tuple[str, str], list[str]] = {}
    for name, e in problems.items():
        key = _starred(name), str(e).replace(repr(name), "")
        groups.setdefault(key, []).append(name)
    lines = [
        str(problems[names[0]]) if len(names) == 1
        else f"{len(names)} arrays {pattern!r}{why}"
        for (pattern, why), names in groups.items()
    ]  # fmt: skip
    more = [f"and {len(lines) - _most} others."] if len(lines) > _most else []
    items = "".join(f"\n- {line}" for line in [*lines[:_most], *more])
    return f"{len(problems)} arrays cannot be written.{items}"


def _starred(name):
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
