import functools as ft
import os
from typing import Any

import ml_dtypes
import numpy as np

from ._checkpoint import Checkpoint, Entry
from ._containers import open_container
from ._layouts import check_hints, layouts, Source
from ._own import is_own


# The parts of a `config.json` about quantization.
_sections = ("quantization_config", "quantization")
_dtypes = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def open(
    path: str | os.PathLike[str], layout: str | None = None, **hints: Any
) -> Checkpoint:
    """Opens a model that any of several libraries wrote, without reading its arrays.

    !!! Example

        ```python
        checkpoint = eqquant.interop.open("model.gguf")
        checkpoint["blk.0.ffn_up.weight"]  # QuantizedArray(f32[11008,4096], Q4_K())
        model = eqquant.interop.load_into(model, checkpoint, rename="llama")
        ```

    **Arguments:**

    - `path`: a GGUF or safetensors file, the index of several safetensors files, or a
        folder with one of these.
    - `layout`: the library that wrote it: `"gguf"`, `"gptq"`, `"awq"`,
        `"bitsandbytes"`, `"compressed-tensors"`, `"mlx"`, `"bitnet"`, `"mxfp4"`
        (gpt-oss), `"torchao"`, or a name given to
        [`eqquant.interop.register_layout`][]. By default, the names and shapes of the
        tensors decide, and a file may have several layouts.
    - `hints`: what neither `config.json` nor the shapes of the tensors tell; these
        override `config.json`:

        - `bits`, for GPTQ and MLX: of a code.
        - `group_size`, for GPTQ, AWQ, compressed-tensors and MLX: the numbers to a
          scale. (The shapes of MLX give only the product `bits * group_size`. Without
          hints, MLX takes 256 to be `4 * 64`.)
        - `version`, for GPTQ: 1 (by default) stores each zero-point minus one, and 2
          stores it as it is.
        - `linear_class`, for BitNet: `"bitlinear"` (by default) divides by the scales,
          and `"autobitlinear"` multiplies by them.

    **Returns:**

    A [`eqquant.interop.Checkpoint`][], which maps names to arrays and reads each on
    access. Nothing is quantized again: a packed array becomes an
    [`eqquant.QuantizedArray`][] with the same codes and scales. Matrices have the shape
    `(out, in)`, as in `eqx.nn.Linear`, except for the experts of gpt-oss, which are
    `(in, out)`. Names are those in the file. Of a GGUF file, rows of queries and keys
    that the llama architecture permutes are in their original order, and
    `checkpoint.metadata` has the tokenizer.

    **Raises:**

    A `ValueError` if there is no such file, if it is damaged (naming the tensor), if no
    array has the layout, or if a hint is unknown. An `OSError` if a file cannot be
    read.
    """
    container = open_container(path)
    try:
        return _checkpoint(container, layout, hints)
    except ValueError as e:
        container.close()
        raise ValueError(f"Could not open {os.fspath(path)!r}: {e}") from e


read_gguf = ft.partial(open, layout="gguf")
read_gptq = ft.partial(open, layout="gptq")
read_awq = ft.partial(open, layout="awq")
read_bitsandbytes = ft.partial(open, layout="bitsandbytes")
read_compressed_tensors = ft.partial(open, layout="compressed-tensors")
read_mlx = ft.partial(open, layout="mlx")
read_bitnet = ft.partial(open, layout="bitnet")
read_mxfp4 = ft.partial(open, layout="mxfp4")


def _checkpoint(container, layout, hints):
    kind = "safetensors"
    if container.is_gguf:
        kind = "gguf"
    elif is_own(container.metadata):
        kind = "eqquant"
    names = [name for name, found in layouts.items() if found.container == kind]
    if layout is not None:
        _check_layout(layout, kind, names)
        names = [layout]
    hints = {key: value for key, value in hints.items() if value is not None}
    check_hints(layout or f"{kind} files", hints, names)
    source = Source(
        container.tensors,
        _section(container.config) | hints,
        container.metadata,
        hints,
        _model_dtype(container.config),
    )
    entries = _entries(source, [layouts[name].find for name in names])
    if kind == "safetensors":
        packed = [e.layout for e in entries.values() if e.format is not None]
        if layout is not None and layout not in packed:
            raise ValueError(f"no array in it has the layout {layout!r}.")
        kind = "+".join(dict.fromkeys(packed)) or kind
    return Checkpoint(
        entries, kind, container.metadata, container.config, container.files
    )


def _check_layout(layout, kind, names):
    if layout not in layouts:
        raise ValueError(
            f"`layout` should be one of {', '.join(layouts)}, or None. Got {layout!r}."
        )
    if layout not in names:
        raise ValueError(
            f"the layout {layout!r} is not one of {kind} files, as this is. Open it "
            "without `layout`."
        )


def _entries(source, find):
    order = {name: i for i, name in enumerate(source.tensors)}
    quantized = [entry for f in find for entry in f(source)]
    used: dict[str, str] = {}
    for entry in quantized:
        for tensor in entry.sources:
            # Arrays of `save` may share stored arrays, as an array and its transpose.
            if tensor.name in used and entry.layout != "eqquant":
                raise ValueError(
                    f"{tensor.name!r} belongs to both {used[tensor.name]!r} and "
                    f"{entry.name!r}."
                )
            used[tensor.name] = entry.name
    dense = [
        Entry(name, t.shape, _dtype(t), None, "dense", (t,), t.read)
        for name, t in source.tensors.items()
        if name not in used
    ]
    entries: dict[str, Entry] = {}
    for entry in sorted((*quantized, *dense), key=lambda e: order[e.sources[0].name]):
        if entry.name in entries:
            raise ValueError(f"it has {entry.name!r} twice, quantized and as it is.")
        entries[entry.name] = entry
    return entries


def _dtype(tensor):
    # A tensor of an unreadable dtype stands for its bytes.
    return np.dtype(np.uint8) if tensor.dtype is None else tensor.dtype


def _section(config):
    for key in _sections:
        if isinstance(config.get(key), dict):
            return dict(config[key])
    return dict(config)


def _model_dtype(config):
    for key in ("dtype", "torch_dtype"):
        if isinstance(config.get(key), str) and config[key] in _dtypes:
            return _dtypes[config[key]]
    return None
