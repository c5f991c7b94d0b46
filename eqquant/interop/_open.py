import fnmatch
import functools as ft
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._checkpoint import Checkpoint, Entry
from ._containers import open_container
from ._layouts import check_hints, layouts, may_be_part, Source, unread
from ._own import all_metadata, is_own
from ._renaming import near
from ._tensors import weight_dtypes


# The parts of a `config.json` about quantization.
_sections = ("quantization_config", "quantization")
_floats = {"F16", "BF16", "F32", "F64"}


def open(
    path: str | os.PathLike[str],
    layout: str | None = None,
    *,
    ordinary: Sequence[str] = (),
    **hints: Any,
) -> Checkpoint:
    """Opens a model in the files of any of several libraries, without reading its
    arrays.

    !!! Example

        ```python
        checkpoint = eqquant.interop.open("model.gguf")
        checkpoint["blk.0.ffn_up.weight"]  # QuantizedArray(f32[11008,4096], Q4_K())
        model = eqquant.interop.load_into(model, checkpoint, rename="llama")
        ```

    **Arguments:**

    - `path`: a GGUF or safetensors file, the index of several safetensors files, or a
        folder with one of these.
    - `layout`: the layout of the file: `"gguf"`, `"gptq"`, `"awq"`, `"bitsandbytes"`,
        `"compressed-tensors"`, `"mlx"`, `"bitnet"`, `"mxfp4"` (gpt-oss), `"torchao"`,
        `"modelopt"` (NVFP4), `"exl3"` (exllamav3), or a name given to
        [`eqquant.interop.register_layout`][]. By default, the names and shapes of the
        tensors decide, and a file may have several layouts.
    - `ordinary`: the names of tensors that are ordinary arrays, though their names or
        dtypes, or a `config.json`, make them look like parts of quantized arrays, such
        as images in `uint8` next to `images_scale`. A `*` matches any text: `["*"]`
        reads all tensors as ordinary arrays. For safetensors files of other libraries.
    - `hints`: options that neither `config.json` nor the shapes of the tensors
        determine. They override `config.json`:

        - `bits`, for GPTQ and MLX: the bits of a code.
        - `group_size`, for GPTQ, AWQ, compressed-tensors and MLX: the number of codes
          per scale. (In MLX, shapes determine only the product `bits * group_size`. By
          default, 256 means `4 * 64`, as in MLX.)
        - `version`, for GPTQ: 1 (by default) stores each zero-point minus one, and 2
          stores it unchanged. (In a symmetric file, the zero-points determine the
          version.)
        - `linear_class`, for BitNet: `"bitlinear"` (by default) divides by the scales,
          and `"autobitlinear"` multiplies by them.

    **Returns:**

    A [`eqquant.interop.Checkpoint`][], which maps names to arrays and reads each on
    access. Arrays are not requantized: a packed array becomes an
    [`eqquant.QuantizedArray`][] with the same codes and scales. Matrices have the shape
    `(out, in)`, as in `eqx.nn.Linear`, except for the experts of gpt-oss, which are
    `(in, out)`. Names are as in the file. For a GGUF file, rows of queries and keys
    that the architecture permutes are restored to their original order, and the one
    that some architectures, such as Gemma, add to norms is subtracted. Arrays of
    architectures that this library does not know are as in the file.
    `checkpoint.metadata` has the tokenizer.

    **Raises:**

    A `ValueError` if `path` is neither GGUF nor safetensors, if a file is damaged
    (naming the tensor), if no array has the layout, if a hint is unknown, or if a name
    in `ordinary` matches no tensor. An `OSError` if a file cannot be read. Parts of
    quantized arrays that no layout reads, such as HQQ's, or codes whose scales are
    missing, have entries, but reading them raises a `ValueError` that mentions
    `ordinary`.
    """
    container = open_container(path)
    try:
        return _checkpoint(container, layout, ordinary, hints)
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
read_exl3 = ft.partial(open, layout="exl3")


def _checkpoint(container, layout, ordinary, hints):
    kind = "safetensors"
    if container.is_gguf:
        kind = "gguf"
    elif is_own(container.metadata):
        kind = "eqquant"
    names = [name for name, found in layouts.items() if found.container == kind]
    if layout is not None:
        _check_layout(layout, kind, names)
        names = [layout]
    # Read the configuration only if it is needed, because it may be damaged or belong
    # to another model.
    tensors = _others(container.tensors, ordinary, kind)
    needed = kind == "safetensors" and not _is_plain(tensors)
    config = container.config() if needed else {}
    hints = {key: value for key, value in hints.items() if value is not None}
    check_hints(layout or f"{kind} files", hints, names)
    source = Source(
        tensors,
        {},
        container.metadata,
        hints,
        _model_dtype(config),
    )
    quantized = []
    for name in names:
        section = _section(config, layouts[name].section)
        quantized += layouts[name].find(source._replace(config=section | hints))
    whys = {}
    if kind == "safetensors":
        whys = unread(tensors, quantized, config)
    entries = _entries(container.tensors, quantized, whys)
    if kind == "safetensors":
        packed = [e.layout for e in entries.values() if e.format is not None]
        if layout is not None and layout not in packed:
            raise ValueError(f"no array in it has the layout {layout!r}.")
        kind = "+".join(dict.fromkeys(packed)) or kind
    metadata = container.metadata
    if kind == "eqquant":
        metadata = all_metadata(container)
    return Checkpoint(entries, kind, metadata, container.config, container.files)


def _others(tensors, ordinary, kind):
    # Returns the tensors that layouts may use.
    if isinstance(ordinary, str):
        raise TypeError(f"`ordinary` should be a list of names. Got {ordinary!r}.")
    if ordinary and kind != "safetensors":
        raise ValueError(
            "`ordinary` is for safetensors files of other libraries. This is a file of "
            f"{kind}, which declares the format of each array."
        )
    found = set()
    for pattern in ordinary:
        some = [name for name in tensors if fnmatch.fnmatchcase(name, pattern)]
        if not some:
            hint = near(pattern, tensors)
            raise ValueError(f"no tensor is {pattern!r}, of `ordinary`{hint or '.'}")
        found.update(some)
    return {name: tensor for name, tensor in tensors.items() if name not in found}


def _is_plain(tensors):
    # Whether all tensors are ordinary arrays of floats, and not scales.
    kinds = {tensor.kind for tensor in tensors.values()}
    return _floats.issuperset(kinds) and not any(map(may_be_part, tensors))


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


def _entries(tensors, quantized, whys):
    order = {name: i for i, name in enumerate(tensors)}
    used: dict[str, str] = {}
    for entry in quantized:
        for tensor in entry.sources:
            # Arrays of `save` may share stored arrays, such as an array and its
            # transpose.
            if tensor.name in used and entry.layout != "eqquant":
                raise ValueError(
                    f"{tensor.name!r} belongs to both {used[tensor.name]!r} and "
                    f"{entry.name!r}."
                )
            used[tensor.name] = entry.name
    dense = [
        Entry(
            *(name, t.shape, _dtype(t), None, "dense", (t,), t.read),
            why_not=whys.get(name),
        )
        for name, t in tensors.items()
        if name not in used
    ]
    entries: dict[str, Entry] = {}
    for entry in sorted((*quantized, *dense), key=lambda e: order[e.sources[0].name]):
        if entry.name in entries:
            raise ValueError(f"it has {entry.name!r} twice, quantized and as it is.")
        entries[entry.name] = entry
    return entries


def _dtype(tensor):
    # A tensor of an unreadable dtype is described by its bytes.
    return np.dtype(np.uint8) if tensor.dtype is None else tensor.dtype


def _section(config, own):
    found = {key: config[key] for key in _sections if isinstance(config.get(key), dict)}
    if own in found:
        return dict(found[own])
    # MLX may use either name. Sections with a method belong to other libraries.
    others = [section for section in found.values() if "quant_method" not in section]
    if others:
        return dict(others[0])
    return {key: x for key, x in config.items() if key not in _sections}


def _model_dtype(config):
    for key in ("dtype", "torch_dtype"):
        if isinstance(config.get(key), str) and config[key] in weight_dtypes:
            return weight_dtypes[config[key]]
    return None
