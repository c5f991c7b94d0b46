import json
import zlib
from typing import Any

from .._containers import check_bounds, parse


# A file of `save` is a safetensors file. Its tensors are named by the paths of the
# arrays: "layers.0.bias" and "layers.0.weight.codes". Its metadata is the JSON below,
# and the checksum of this JSON.
#
# - "version": of this layout, and of the stored arrays of each format.
# - "tree": {"dict": [[key, tree], ...]}, {"list": [tree, ...]}, {"array": name},
#   {"quantized": name}, {"complex": [real, imaginary]}, or a boolean, a number or null.
# - "arrays": {name: {"dtype", "shape"}}, for the array that the tensor holds. NumPy
#   arrays and scalars also have "numpy", which is "array" or "scalar".
# - "quantized": {name: {"shape", "dtype", "format", "activation", "axis", "tail",
#   "row_axis", "inner", "sharding", "stored"}}, of which "stored" is a tree; and
#   "writable" if that is true.
# - "on_call": [[path, every_method], ...], for the modules that run under `implicit`.
#   A path is a list of keys of "tree". Files of earlier versions lack this entry.
#
# A format is {"name", "fields"}. Stored arrays are as in memory: "row_axis" is the axis
# of their rows, which is one of the last two. Version 1 has no "row_axis": it is -2
# there, and formats are packed as on CPUs.
#
# A model may also be in several files. Then it is their index that has this metadata,
# and each of them names the index.
layout_version = 2

_key, _checksum_key, _index_key = "eqquant", "eqquant.crc32", "eqquant.index"


def to_header(layout: dict[str, Any]) -> dict[str, str]:
    """Returns the metadata of a safetensors file that describe a tree."""
    text = json.dumps({"version": layout_version, **layout})
    # Make sure that the header can be read again.
    check_bounds(text.encode(), "the description of `m`")
    return {_key: text, _checksum_key: _checksum(text)}


def to_part(index: str) -> dict[str, str]:
    """Returns the metadata of one file of several, with the name of their index."""
    return {_index_key: index}


def is_own(metadata: dict[str, str]) -> bool:
    """Whether these are the metadata of a file of `save` or `convert`, or of one of
    several such files."""
    return _key in metadata or _index_key in metadata


def from_header(metadata: dict[str, str]) -> dict[str, Any]:
    """The inverse of `to_header`. Raises a `ValueError` if another library wrote it, if
    its version is newer than this library, or if it is damaged."""
    if _index_key in metadata and _key not in metadata:
        raise ValueError(
            "it is one of several files of a model, which have to be loaded together, "
            f"by their index {metadata[_index_key]!r} or by the folder with this index."
        )
    if _key not in metadata:
        raise ValueError(
            "`eqquant.save` did not write it. Open files of other libraries with "
            "`eqquant.interop.open`."
        )
    text = metadata[_key]
    try:
        layout = parse(text.encode(), "it")
    except ValueError as e:
        raise damaged("its metadata is damaged", e) from e
    version = layout.get("version")
    if type(version) is not int or version < 1:
        raise damaged("its metadata is damaged", f"got version {version!r}")
    if version > layout_version:
        raise ValueError(
            f"the file has version {version}, and this version of eqquant reads files "
            f"up to version {layout_version}. Use a later version of eqquant."
        )
    if metadata.get(_checksum_key) != _checksum(text):
        raise damaged("its metadata is damaged", "the checksum differs")
    return layout


def damaged(what: str, reason: Any) -> ValueError:
    return ValueError(
        f"{what} ({reason}). Save the model again, or get another copy of the file."
    )


def _checksum(text):
    return f"{zlib.crc32(text.encode()):08x}"
