import functools as ft
import pathlib
from collections.abc import Callable
from typing import Any

from ._json import read_json


# The names of configurations. Older quantized models have the last two.
_names = ("config.json", "quantize_config.json", "quant_config.json")


def config_names(path: pathlib.Path) -> tuple[str, ...]:
    """Returns the possible names of the configuration of a file. The first belongs to
    this file alone."""
    return f"{path.stem}.config.json", *_names


def config_beside(path: pathlib.Path) -> Callable[[], dict[str, Any]]:
    """Returns a function that reads the configuration from a JSON file next to a model,
    if there is one. It is read on the first call, since not every model needs it. The
    function raises a `ValueError` if the configuration is damaged."""
    for name in config_names(path):
        beside = path.with_name(name)
        if beside.is_file():
            return ft.cache(ft.partial(read_json, beside))
    return dict
