import json
import zlib
from typing import Any


# The layout of a file. Its tensors go by the paths of the arrays: "layers.0.bias" and
# "layers.0.weight.codes". Its metadata is the following JSON, and the checksum of that.
#
# - "version": of this layout, and of what each format stores.
# - "tree": {"dict": [[key, tree], ...]}, {"list": [tree, ...]}, {"array": name},
#   {"quantized": name}, {"complex": [real, imaginary]}, or a boolean, a number or null.
# - "arrays": {name: {"dtype", "shape"}}, of the array that the tensor holds. With
#   "numpy", which is "array" or "scalar", if it was one of NumPy's.
# - "quantized": {name: {"shape", "dtype", "format", "activation", "axis", "tail",
#   "inner", "sharding", "stored"}}, of which "stored" is a tree.
#
# A format is {"name", "fields"}. The arrays of a quantized one have the axes `*b n _`,
# the rows before what is contracted, however they lie in memory.
#
# A model may also be in several files. Then it is their index that has this metadata,
# and each of them names the index.
layout_version = 1

_key, _checksum_key, _index_key = "eqquant", "eqquant.crc32", "eqquant.index"


def to_header(layout: dict[str, Any]) -> dict[str, str]:
    """Writes all that is not a tensor as the metadata of a safetensors file."""
    text = json.dumps({"version": layout_version, **layout})
    return {_key: text, _checksum_key: _checksum(text)}


def to_part(index: str) -> dict[str, str]:
    """The metadata of one file of several, by the name of their index."""
    return {_index_key: index}


def is_own(metadata: dict[str, str]) -> bool:
    """Whether metadata are those of a file of this library, or of a part of one."""
    return _key in metadata or _index_key in metadata


def from_header(metadata: dict[str, str] | None) -> dict[str, Any]:
    """The inverse of `to_header`.

    **Raises:**

    A `ValueError` if this is of another library, of a later version, or damaged.
    """
    if metadata is not None and _index_key in metadata and _key not in metadata:
        raise ValueError(
            "it is one of several files of a model. Give their folder, or their index, "
            f"{metadata[_index_key]!r}."
        )
    if metadata is None or _key not in metadata:
        raise ValueError(
            "it is a safetensors file, but not one of `eqquant.save`. Read its arrays "
            "with `safetensors.numpy.load_file`."
        )
    text = metadata[_key]
    try:
        layout = json.loads(text)
    except json.JSONDecodeError as e:
        raise damaged("its metadata is damaged", e) from e
    version = layout.get("version") if isinstance(layout, dict) else None
    if type(version) is not int or version < 1:
        raise damaged("its metadata is damaged", f"got version {version!r}")
    if version > layout_version:
        raise ValueError(
            f"it has version {version} of the layout, of which this version of eqquant "
            f"knows those up to {layout_version}. Use a later version of eqquant."
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
