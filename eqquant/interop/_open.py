import os
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from ._checkpoint import Checkpoint, Entry
from ._containers import open_container
from ._layouts import (
    find_awq,
    find_bitnet,
    find_bitsandbytes,
    find_compressed,
    find_gguf,
    find_gptq,
    find_mlx,
    find_mxfp4,
    find_torchao,
    Source,
)
from ._own import find_eqquant, is_own


_layouts: dict[str, tuple[Callable[[Source], Iterator[Entry]], ...]] = {
    "gptq": (find_gptq,),
    "awq": (find_awq,),
    "bitsandbytes": (find_bitsandbytes,),
    "compressed-tensors": (find_compressed,),
    "mlx": (find_mlx,),
    "bitnet": (find_bitnet,),
    "mxfp4": (find_mxfp4,),
    "torchao": (find_torchao,),
}
# Where a configuration tells of how a model is quantized.
_sections = ("quantization_config", "quantization")
_dtypes = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a model that any of several libraries wrote, without reading it.

    !!! Example

        ```python
        checkpoint = eqquant.interop.open("model.gguf")
        checkpoint["blk.0.ffn_up.weight"]  # QuantizedArray(f32[11008,4096], Q4_K())
        model = eqquant.interop.load_into(model, checkpoint, rename="llama")
        ```

    **Arguments:**

    - `path`: of a file of GGUF or of safetensors; of the index of several files of
        safetensors; or of a folder that has either. What the library was is found out
        by the names and the shapes of the tensors: GPTQ, AWQ, bitsandbytes,
        compressed-tensors, MLX, BitNet, gpt-oss, or none of these.

    **Returns:**

    A [`eqquant.interop.Checkpoint`][], which is a mapping from names to arrays. Each is
    read when it is asked for, and nothing is quantized again: what was stored packed
    is a [`eqquant.QuantizedArray`][] of the same codes and scales. Matrices have the
    shape `(out, in)`, as in `eqx.nn.Linear`.

    **Raises:**

    A `ValueError` if there is no such file in it, or a damaged one, with the name of
    the tensor. An `OSError` if a file cannot be read.
    """
    return _opened(path, None)


def read_gguf(path: str | os.PathLike[str]) -> Checkpoint:
    """As [`eqquant.interop.open`][], of a file of GGUF. Its metadata, the fields of the
    tokenizer among them, are `checkpoint.metadata`: a plain dictionary.

    Names are those of the file: `"blk.0.attn_q.weight"`. The rows of queries and keys,
    which it has in another order for the llama architecture, are in their first order.
    """
    return _opened(path, "gguf")


def read_gptq(
    path: str | os.PathLike[str],
    *,
    version: int | None = None,
    bits: int | None = None,
    group_size: int | None = None,
) -> Checkpoint:
    """As [`eqquant.interop.open`][], of a model of GPTQ.

    **Arguments:**

    - `path`: of the file, index or folder.
    - `version`: of the layout. By default as its configuration says, or else 1. (Of
        zero-points, version 1 has one less than they are.)
    - `bits`, `group_size`: if neither its configuration nor the shapes tell.
    """
    if version not in (None, 1, 2):
        raise ValueError(f"`version` should be 1 or 2. Got {version!r}.")
    formats = {None: None, 1: "gptq", 2: "gptq_v2"}
    return _opened(
        path,
        "gptq",
        checkpoint_format=formats[version],
        bits=bits,
        group_size=group_size,
    )


def read_awq(
    path: str | os.PathLike[str], *, group_size: int | None = None
) -> Checkpoint:
    """As [`eqquant.interop.open`][], of a model of AWQ, for its GEMM kernels.

    **Arguments:**

    - `path`: of the file, index or folder.
    - `group_size`: if neither its configuration nor the shapes tell.
    """
    return _opened(path, "awq", group_size=group_size)


def read_bitsandbytes(path: str | os.PathLike[str]) -> Checkpoint:
    """As [`eqquant.interop.open`][], of a model of bitsandbytes: of 4 bits, NF4 or FP4,
    whose scales may be quantized too; or of 8 bits."""
    return _opened(path, "bitsandbytes")


def read_compressed_tensors(
    path: str | os.PathLike[str], *, group_size: int | None = None
) -> Checkpoint:
    """As [`eqquant.interop.open`][], of a model of compressed-tensors: of integers,
    packed or not, or floating-point numbers of 8 and of 4 bits.

    **Arguments:**

    - `path`: of the file, index or folder.
    - `group_size`: if neither its configuration nor the shapes tell.
    """
    return _opened(path, "compressed-tensors", group_size=group_size)


def read_mlx(
    path: str | os.PathLike[str],
    *,
    bits: int | None = None,
    group_size: int | None = None,
) -> Checkpoint:
    """As [`eqquant.interop.open`][], of a model of MLX.

    **Arguments:**

    - `path`: of the file, index or folder.
    - `bits`, `group_size`: if its configuration does not tell. Only their product can
        be seen from the shapes. If that is 256, and nothing is said, they are 4 and 64,
        as MLX itself takes them; else it is an error if the product is not enough.
    """
    return _opened(path, "mlx", bits=bits, group_size=group_size)


def read_bitnet(
    path: str | os.PathLike[str], *, linear_class: str | None = None
) -> Checkpoint:
    """As [`eqquant.interop.open`][], of a model of BitNet b1.58.

    **Arguments:**

    - `path`: of the file, index or folder.
    - `linear_class`: `"bitlinear"`, which divides by the scales, or `"autobitlinear"`,
        which multiplies with them. By default as its configuration says, or else the
        former.
    """
    if linear_class not in (None, "bitlinear", "autobitlinear"):
        raise ValueError(
            "`linear_class` should be 'bitlinear' or 'autobitlinear'. Got "
            f"{linear_class!r}."
        )
    return _opened(path, "bitnet", linear_class=linear_class)


def read_mxfp4(path: str | os.PathLike[str]) -> Checkpoint:
    """As [`eqquant.interop.open`][], of a model such as gpt-oss, whose experts are in
    MXFP4. Each of them is `(in, out)`."""
    return _opened(path, "mxfp4")


def _opened(path, layout, **said):
    container = open_container(path)
    try:
        return _checkpoint(container, layout, said)
    except ValueError as e:
        container.close()
        raise ValueError(f"Could not open {os.fspath(path)!r}: {e}") from e


def _checkpoint(container, layout, said):
    if container.is_gguf:
        source, find = Source(container.tensors, container.metadata, None), [find_gguf]
    elif is_own(container.metadata):
        source = Source(container.tensors, container.metadata, None)
        find = [find_eqquant]
    else:
        config = _section(container.config)
        config |= {key: value for key, value in said.items() if value is not None}
        source = Source(container.tensors, config, _model_dtype(container.config))
        find = [
            f for name in _layouts if layout in (None, name) for f in _layouts[name]
        ]
    if layout is not None and (layout == "gguf") != container.is_gguf:
        kind = "GGUF" if container.is_gguf else "safetensors"
        raise ValueError(f"it is of {kind}. Read it with `eqquant.interop.open`.")
    entries = _entries(source, find)
    kinds = dict.fromkeys(e.layout for e in entries.values() if e.format is not None)
    if container.is_gguf:
        kinds = {"gguf": None}
    elif is_own(container.metadata):
        kinds = {"eqquant": None}
    if layout is not None and layout not in kinds:
        raise ValueError(f"nothing in it is as {layout} writes it.")
    return Checkpoint(
        entries,
        "+".join(kinds) or "safetensors",
        container.metadata,
        container.config,
        container.files,
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
    # Of one that cannot be read, that of its bytes.
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
