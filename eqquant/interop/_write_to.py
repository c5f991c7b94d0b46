import functools as ft
import os
import pathlib
import secrets
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._array import is_quantized
from ._checkpoint import Checkpoint
from ._containers import gguf_layout, Part, safetensors_layout, TensorFile
from ._layouts import (
    check_architecture,
    gguf_parts,
    layouts,
    parts_of,
    parts_of_each,
    writers,
)
from ._llama_cpp import ModelFile
from ._nodes import by_name, is_array
from ._renaming import evaluated, has_table, moved, Piece, sources
from ._replacing import replacing
from ._replacing_model import replacing_model


def write_gguf(
    path: str | os.PathLike[str],
    tensors: Any,
    metadata: dict[str, Any] | None = None,
    *,
    rename: Any = None,
    config: str | os.PathLike[str] | Checkpoint | None = None,
) -> None:
    """Writes a GGUF file of version 3. With a `config`, llama.cpp can load it.

    !!! Example

        ```python
        w = eqquant.quantize(w, "q4_k", axis=-1)
        weights = {"blk.0.ffn_up.weight": w}
        metadata = {"general.architecture": "llama", "llama.block_count": 1}
        eqquant.interop.write_gguf("model.gguf", weights, metadata)

        # A whole model, with its hyperparameters and tokenizer from a Hugging Face
        # folder.
        eqquant.interop.write_gguf("model.gguf", model, config="folder")
        ```

    **Arguments:**

    - `path`: the file. An existing file is replaced atomically.
    - `tensors`: names and arrays: a dictionary, any other PyTree, or an
        [`eqquant.interop.Checkpoint`][], whose arrays are read one at a time. No array
        is quantized or requantized; a format without a GGUF type is an error. Quantized
        arrays must be contracted along their last axis.
    - `metadata`: text, booleans, numbers, and lists of one of these. The arrays are
        converted to the conventions of a known `"general.architecture"`. Some, such as
        `"llama"`, `"mistral3"` and `"granite"`, permute the rows of `blk.*.attn_q` and
        `blk.*.attn_k`, which needs `"llama.attention.head_count"` and
        `"llama.attention.head_count_kv"`. Some, such as `"gemma3"` and `"nemotron"`,
        add one to the weights of norms. `open` reverts both.
    - `rename`: rules from the names of `tensors` to the names in the file, as in
        [`eqquant.interop.load_into`][]. But here, `"llama"`, `"mistral"` and `"qwen"`
        map Hugging Face's names to llama.cpp's, if the architecture in the metadata is
        known.
    - `config`: the source of the hyperparameters and the tokenizer: a Hugging Face
        folder with `config.json` and `tokenizer.json` (or `tokenizer.model`), or a GGUF
        file, of Llama, Mistral, Qwen 2 or 3, or Gemma 1, 2 or 3. The arrays are then
        stored as llama.cpp expects: Hugging Face's names, with or without the first
        `model.`, are renamed, and norms and biases are in float32. A GGUF file may also
        have another known architecture, in which case only its metadata are used.
        `metadata` takes precedence; `{"tokenizer.ggml.model": "none"}` leaves out the
        tokenizer.

    **Raises:**

    A `ValueError` if an array or a value cannot be written. With a `config`, also if an
    array is missing or has the wrong shape, or if llama.cpp could not run the model.
    """
    arrays = _Arrays(tensors, rename, inverse=True)
    if config is not None:
        model = ModelFile(config, arrays.structs, metadata)
        parts_of, metadata = model.parts, model.metadata
    else:
        metadata = {} if metadata is None else metadata
        if has_table(rename):
            check_architecture(metadata, "Use patterns as `rename`.")
        parts_of = lambda name, x: gguf_parts(name, x, metadata)
    parts = arrays.parts(parts_of)
    with replacing(path, secrets.token_hex(4)) as temporary:
        _write(temporary, arrays, parts_of, parts, gguf_layout(parts, metadata))


def write(
    path: str | os.PathLike[str], tensors: Any, layout: str, *, rename: Any = None
) -> None:
    """Writes a safetensors file in the layout of another library, and its
    `config.json`.

    !!! Example

        ```python
        weights = {"up.weight": eqquant.quantize(w, eqquant.Int4(128), axis=-1)}
        eqquant.interop.write("model", weights, "compressed-tensors")
        ```

    **Arguments:**

    - `path`: the file. Its configuration is written next to it, as `model.config.json`
        for `model.safetensors`. Or a folder, for the files `model.safetensors` and
        `config.json`. These replace a model in the folder: its index, the files that
        the index names, and the sections of its configuration about quantization are
        removed; other entries of the configuration are kept. If the process is killed,
        the folder opens as the old model or as the new one, or `open` refuses it until
        it is written again.
    - `tensors`: as in [`eqquant.interop.write_gguf`][]. The names of quantized arrays
        must end with `.weight`, except for bitsandbytes.
    - `layout`: the library, and the formats that it supports:

        - `"mlx"`: `Int(bits, block_size, offset="minimum")`, `MXFP4()`, `MXFP8()`;
        - `"compressed-tensors"`: `Int` without minima, `Int4`, `Int8`, `FP8`, `MXFP4`
          and `NVFP4(inverse=True)`;
        - `"gptq"`, in version 2 of its layout: `Int4`, and `Int` of 2, 3, 4 and 8 bits
          without minima, with 16-bit scales, and the same bits and block size for all
          arrays;
        - `"bitsandbytes"`: `NF4`, `BnbFP4`, and `Nested` of these with `BnbScale`;
        - `"exl3"`: `EXL3`, of files of exllamav3;
        - or a name given to [`eqquant.interop.register_layout`][].

    - `rename`: rules from the names of `tensors` to the names in the file, as in
        [`eqquant.interop.load_into`][].

    **Raises:**

    A `ValueError` if an array cannot be written, if there is no such layout, or if the
    folder has parts of other models that would be read together with this one.
    """
    if layout not in writers():
        raise ValueError(
            f"`layout` should be one of {', '.join(writers())}. Got {layout!r}. For "
            "GGUF, call `write_gguf`."
        )
    library, path = layouts[layout], pathlib.Path(path)
    is_folder = path.is_dir() or path.suffix != ".safetensors"
    if is_folder:
        path = path / "model.safetensors"
    each = ft.partial(parts_of, library)
    arrays = _Arrays(tensors, rename)
    parts = arrays.parts(each)
    packed = {name: x for name, x in arrays.structs.items() if is_quantized(x)}
    config = library.config({name: x.format for name, x in packed.items()})
    types = {key: part.type for key, part in parts.items()}
    about = safetensors_layout(types, library.metadata)
    with replacing_model(path, is_folder, config) as temporary:
        _write(temporary, arrays, each, parts, about)


write_mlx = ft.partial(write, layout="mlx")
write_compressed_tensors = ft.partial(write, layout="compressed-tensors")
write_gptq = ft.partial(write, layout="gptq")
write_bitsandbytes = ft.partial(write, layout="bitsandbytes")
write_exl3 = ft.partial(write, layout="exl3")


class _Arrays:
    """The arrays to write, by their names in the file.

    - `structs`: the arrays with structs instead of numbers.
    """

    def __init__(self, tensors: Any, rename: Any, inverse: bool = False):
        found = (
            tensors.entries
            if isinstance(tensors, Checkpoint)
            else by_name(tensors, "tensors", is_array)
        )
        if not found and jtu.tree_leaves(tensors):
            raise TypeError(
                "`tensors` should be names and arrays, or a PyTree with arrays. Got "
                f"no array in {type(tensors).__name__}."
            )
        if isinstance(tensors, Checkpoint) and not inverse and has_table(rename):
            check_architecture(tensors.metadata, "Use patterns as `rename`.")
        read = tensors.__getitem__ if isinstance(tensors, Checkpoint) else found.get
        named, problems, hidden = moved(sources(found, read), rename, None, inverse)
        if problems:
            lines = "".join(f"\n- {problem}" for problem in (*problems, *hidden))
            raise ValueError(f"`rename` does not fit `tensors`.{lines}")
        self._pieces: dict[str, Piece] = {}
        for name, piece in named:
            if name in self._pieces:
                first, second = self._pieces[name].names[0], piece.names[0]
                raise ValueError(
                    f"{first!r} and {second!r} would both be written as {name!r}."
                )
            self._pieces[name] = piece
        self.structs = {name: piece.struct() for name, piece in self._pieces.items()}

    def parts(self, parts_of: Callable[[str, Any], dict[str, Part]]):
        """Returns the tensors of all arrays."""
        found = parts_of_each(parts_of, self.structs).values()
        return {key: part for parts in found for key, part in parts.items()}

    def each(self, use: Callable[[str, Any], None]) -> None:
        """Reads the arrays one after another, and calls `use(name, array)`."""
        names = list(self._pieces)
        evaluated(list(self._pieces.values()), lambda i, x: use(names[i], x))


def _write(path, arrays, parts_of, parts, layout):
    with TensorFile(path, parts, layout) as file:

        def write(name, x):
            for key, part in parts_of(name, x).items():
                file.write(key, part.make())

        arrays.each(write)
