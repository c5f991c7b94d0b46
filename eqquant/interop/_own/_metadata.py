import pathlib
import warnings
from typing import Any

from .._containers import Container, gguf_layout, open_container


# The metadata of a GGUF file (hyperparameters, a tokenizer) may be too long for a
# header. They are kept in a GGUF file without arrays, which the header names.
_key = "eqquant.metadata"
_header_keys = "eqquant"


def metadata_name(stem: str | None) -> str:
    """Returns the name of the file of metadata. `stem` is the stem of the name of the
    model's file, or `None` for a folder."""
    return "metadata.gguf" if stem is None else f"{stem}.metadata.gguf"


def naming(name: str) -> dict[str, str]:
    """Returns the entry of a header that names the file of metadata."""
    return {_key: name}


def metadata_file(metadata: dict[str, Any]) -> bytes:
    """Returns the contents of a file of metadata."""
    return gguf_layout({}, metadata).header


def gguf_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata that come from GGUF, without this library's own keys."""
    return {k: v for k, v in metadata.items() if not k.startswith(_header_keys)}


def all_metadata(container: Container) -> dict[str, Any]:
    """Returns the metadata of a file of `save` or `convert`, including the file of
    metadata next to it. Raises a `ValueError` if the file of metadata is damaged."""
    name = container.metadata.get(_key)
    if name is None:
        return container.metadata
    # The name must not be a path on any system.
    if not isinstance(name, str) or not name or set(name) & set("/\\:\0"):
        raise ValueError(f"its metadata should be a file of its folder. Got {name!r}.")
    path = pathlib.Path(container.files[0].path).with_name(name)
    if not path.is_file():
        warnings.warn(
            f"{container.files[0].path!r} has its metadata, such as the tokenizer, in "
            f"{name!r}, which is not beside it.",
            stacklevel=2,
        )
        return container.metadata
    found = open_container(path)
    found.close()
    return found.metadata | container.metadata
