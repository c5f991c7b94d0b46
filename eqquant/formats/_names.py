import inspect
from collections.abc import Callable
from typing import Any

from ._base import AbstractFormat


def known_formats() -> dict[str, Callable[..., AbstractFormat]]:
    """Each format there is, by the lower-case name of its class: those of this library
    and those that a user has defined."""
    found = {}
    todo: list[type[AbstractFormat]] = [AbstractFormat]
    while todo:
        cls = todo.pop(0)
        todo.extend(cls.__subclasses__())
        if not inspect.isabstract(cls) and not cls.__name__.startswith("Abstract"):
            found[cls.__name__.lower()] = cls
    return found


def as_format(format: AbstractFormat | str | Any) -> AbstractFormat:
    """A format from itself, or from its name."""
    if isinstance(format, AbstractFormat):
        return format
    known = known_formats()
    if isinstance(format, str):
        if format.lower() in known:
            return known[format.lower()]()
        raise ValueError(
            f"Unknown format name {format!r}. The known names are "
            f"{', '.join(sorted(known))}."
        )
    if isinstance(format, type) and issubclass(format, AbstractFormat):
        raise TypeError(
            "`format` should be a value, not a class. Got the class "
            f"{format.__name__}; write `{format.__name__}()`."
        )
    raise TypeError(
        "`format` should be a format such as `NF4(block_size=64)`, or the name of one: "
        f"{', '.join(sorted(known))}. Got {format!r}."
    )
