import functools as ft
import pathlib
from collections.abc import Callable
from typing import Any

from ._json import read_json


# Names of configurations; older quantized models have the last two.
_names = ("config.json", "quantize_config.json", "quant_config.json")


def config_names(path: pathlib.Path) -> tuple[str, ...]:
    """The names that the configuration of a file may have: the first may be of this
    file alone."""
    return f"{path.stem}.config.json", *_names


def config_beside(path: pathlib.Path) -> Callable[[], dict[str, Any]]:
    """Reads the configuration in a JSON file next to a model, if there is one: once it
    is called, since not every file needs what lies beside it. It raises a `ValueError`
    if the configuration is damaged."""
    for name in config_names(path):
        beside = path.with_name(name)
        if beside.is_file():
            return ft.cache(ft.partial(read_json, beside))
    return dict
