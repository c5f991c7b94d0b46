import functools as ft
import json
import operator
import os
import pathlib
import secrets
from collections.abc import Iterator
from typing import Any

from .._array import is_quantized
from ._checkpoint import Checkpoint
from ._containers import gguf_layout, parse, safetensors_layout, TensorFile
from ._folder import make_folder
from ._layouts import (
    bitsandbytes_config,
    bitsandbytes_parts,
    compressed_config,
    compressed_parts,
    gguf_parts,
    gptq_config,
    gptq_parts,
    mlx_config,
    mlx_parts,
)
from ._nodes import dotted, is_data, leaves, python_scalar
from ._rename import renamed
from ._replacing import replacing


def write_gguf(
    path: str | os.PathLike[str],
    tensors: Any,
    metadata: dict[str, Any] | None = None,
    *,
    rename: Any = None,
) -> None:
    """Writes a file of GGUF, version 3.

    !!! Example

        ```python
        weights = {"blk.0.ffn_up.weight": eqquant.quantize(w, eqquant.Q4_K(), axis=-1)}
        metadata = {"general.architecture": "llama", "llama.block_count": 1}
        eqquant.interop.write_gguf("model.gguf", weights, metadata)
        ```

    **Arguments:**

    - `path`: of the file. One that is there already is replaced at once and as a whole.
    - `tensors`: names and arrays: a dictionary, any other PyTree, or a
        [`eqquant.interop.Checkpoint`][], of which one array is read after another.
        Nothing is quantized here, and of quantized arrays nothing is changed: those
        that GGUF has no type for are an error. They have to be contracted along their
        last axis.
    - `metadata`: text, booleans, numbers, and lists of one of these. If
        `"general.architecture"` is `"llama"`, then the rows of `blk.*.attn_q` and of
        `blk.*.attn_k` are put in the order that they have there, which takes
        `"llama.attention.head_count"` and `"llama.attention.head_count_kv"`.
    - `rename`: from the names of `tensors` to those in the file, as of
        [`eqquant.interop.load_into`][]. But `"llama"`, `"mistral"` and `"qwen"` are for
        the names that Hugging Face has in models of this family, and they become those
        of llama.cpp.

    **Raises:**

    A `ValueError` if an array, or a value, cannot be written.
    """
    metadata = {} if metadata is None else metadata

    def parts_of(name, x):
        names = renamed(name, rename, inverse=True)
        each = [gguf_parts(name, x, metadata) for name in names]
        return ft.reduce(operator.or_, each, {})

    parts = _parts(tensors, parts_of)
    _write(path, tensors, parts_of, parts, gguf_layout(parts, metadata))


def write_mlx(path: str | os.PathLike[str], tensors: Any) -> None:
    """Writes a file of safetensors with arrays as MLX has them: of `Int(bits,
    block_size, offset="minimum")`, `MXFP4()` and `MXFP8()`, in words of 32 bits, with
    `scales` and `biases`; and of arrays that are not quantized.

    **Arguments:**

    - `path`: of the file, beside which another is written that tells of the format:
        `model.config.json` for `model.safetensors`. Or of a folder, for the files
        `model.safetensors` and `config.json`; what else the latter says stays.
    - `tensors`: as of [`eqquant.interop.write_gguf`][]. The names of quantized arrays
        end with `.weight`.

    **Raises:**

    A `ValueError` if an array cannot be written.
    """
    _write_folder(path, tensors, mlx_parts, mlx_config, {"format": "mlx"})


def write_compressed_tensors(path: str | os.PathLike[str], tensors: Any) -> None:
    """As [`eqquant.interop.write_mlx`][], of arrays as compressed-tensors has them: of
    `Int`, but for minima, `Int4`, `Int8`, `FP8`, `MXFP4` and `NVFP4(inverse=True)`."""
    _write_folder(path, tensors, compressed_parts, compressed_config, {"format": "pt"})


def write_gptq(path: str | os.PathLike[str], tensors: Any) -> None:
    """As [`eqquant.interop.write_mlx`][], of arrays as GPTQ has them, in version 2 of
    its layout: of `Int4`, and of `Int` of 2, 3, 4 and 8 bits but for minima, with
    scales of 16 bits. All have as many bits and as large blocks."""
    _write_folder(path, tensors, gptq_parts, gptq_config, {"format": "pt"})


def write_bitsandbytes(path: str | os.PathLike[str], tensors: Any) -> None:
    """As [`eqquant.interop.write_mlx`][], of arrays as bitsandbytes has them: of `NF4`
    and `BnbFP4`, and of `Nested` of these with `BnbScale` as the format of scales.
    Their names need not end with `.weight`."""
    _write_folder(
        path, tensors, bitsandbytes_parts, bitsandbytes_config, {"format": "pt"}
    )


def _write_folder(path, tensors, parts_of, config_of, metadata):
    path = pathlib.Path(path)
    is_folder = path.is_dir() or not path.suffix
    if is_folder:
        beside = path / "config.json"
        path = path / "model.safetensors"
    else:
        beside = path.with_name(f"{path.stem}.config.json")
    parts = _parts(tensors, parts_of)
    config = config_of(
        {name: x.format for name, x in _structs(tensors) if is_quantized(x)}
    )
    if is_folder and beside.is_file():
        config = {**parse(beside.read_bytes(), repr(str(beside))), **config}
    make_folder(path)
    layout = safetensors_layout({k: part.type for k, part in parts.items()}, metadata)
    _write(path, tensors, parts_of, parts, layout)
    if config:
        with _replacing(beside) as temporary:
            pathlib.Path(temporary).write_text(json.dumps(config, indent=2))


def _parts(tensors, parts_of):
    parts, owners = {}, {}
    for name, x in _structs(tensors):
        for key, part in parts_of(name, x).items():
            if key in parts:
                raise ValueError(
                    f"{name!r} and {owners[key]!r} would both be written as {key!r}."
                )
            parts[key], owners[key] = part, name
    return parts


def _write(path, tensors, parts_of, parts, layout):
    with _replacing(path) as temporary, TensorFile(temporary, parts, layout) as file:
        for name, x in _arrays(tensors):
            for key, part in parts_of(name, x).items():
                file.write(key, part.make())


def _replacing(path):
    return replacing(path, secrets.token_hex(4))


def _structs(tensors: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tensors, Checkpoint):
        return ((name, entry.struct()) for name, entry in tensors.entries.items())
    return _arrays(tensors)


def _arrays(tensors):
    if isinstance(tensors, Checkpoint):
        yield from tensors.items()
        return
    for path, leaf in leaves(tensors):
        if is_data(leaf) and python_scalar(leaf) is None:
            yield dotted(path), leaf
