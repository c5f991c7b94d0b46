import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._base import AbstractFormat
from ._names import known_formats


def format_to_json(format: AbstractFormat) -> dict[str, Any]:
    """Returns the name of a format's class, and its fields.

    **Raises:**

    A `ValueError` if a field cannot be written, or if the class would not give the same
    format again.
    """
    json = {
        "name": type(format).__name__,
        "fields": {
            field.name: _to_json(format, field.name)
            for field in dataclasses.fields(format)
        },
    }
    known = known_formats().get(type(format).__name__.lower())
    if known is not type(format):
        raise ValueError(
            f"the format {format} could not be loaded. Files store the names of "
            f"classes, and {type(format)} has the same name as {known}."
        )
    if format_from_json(json) != format:
        raise ValueError(
            f"the format {format} would load as {format_from_json(json)}. Calling its "
            "class with its fields should give the same format."
        )
    return json


def format_from_json(json: dict[str, Any]) -> AbstractFormat:
    """The inverse of `format_to_json`.

    **Raises:**

    A `ValueError` if no class has this name, or if it does not take the fields.
    """
    known = known_formats()
    name = json["name"]
    if name.lower() not in known:
        raise ValueError(
            f"there is no format {name!r}. Known formats are "
            f"{', '.join(sorted(cls.__name__ for cls in known.values()))}. If it is "
            "your own, first import the module that defines it."
        )
    cls: Any = known[name.lower()]
    fields = {key: _from_json(value) for key, value in json["fields"].items()}
    try:
        return cls(**fields)
    except (TypeError, ValueError) as e:
        raise ValueError(f"the format {name!r} cannot be made of {fields}. {e}") from e


def _to_json(format, name):
    value = getattr(format, name)
    if isinstance(value, AbstractFormat):
        return format_to_json(value)
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(
        f"the format {format} cannot be saved: its field `{name}` should be a boolean, "
        "an integer, a float, a string, None, a `numpy.dtype` or a format. Got "
        f"{value!r}."
    )


def _from_json(value):
    if isinstance(value, list):
        raise ValueError(f"a field of a format should not be a list. Got {value}.")
    if not isinstance(value, dict):
        return value
    return jnp.dtype(value["dtype"]) if "dtype" in value else format_from_json(value)
