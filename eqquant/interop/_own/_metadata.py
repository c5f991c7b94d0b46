import pathlib
import warnings
from typing import Any

from .._containers import Container, gguf_layout, open_container


# What a GGUF file tells besides its arrays (hyperparameters, a tokenizer) may be too
# long for a header. It is in a GGUF file without arrays, which the header names.
_key = "eqquant.metadata"
_header_keys = "eqquant"


def metadata_name(stem: str | None) -> str:
    """The name of the file of metadata. `stem` is that of the name of the model's file;
    `None` for a folder."""
    return "metadata.gguf" if stem is None else f"{stem}.metadata.gguf"


def naming(name: str) -> dict[str, str]:
    """The entry of a header that names the file of metadata."""
    return {_key: name}


def metadata_file(metadata: dict[str, Any]) -> bytes:
    """The contents of a file of metadata."""
    return gguf_layout({}, metadata).header


def gguf_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a GGUF file, of that of a file of GGUF or of `convert`."""
    return {k: v for k, v in metadata.items() if not k.startswith(_header_keys)}


def all_metadata(container: Container) -> dict[str, Any]:
    """The metadata of a file of `save` or `convert`, with those beside it.

    **Raises:**

    A `ValueError` if the file of metadata is damaged.
    """
    name = container.metadata.get(_key)
    if name is None:
        return container.metadata
    # On any system, not a path.
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
