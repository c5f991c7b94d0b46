import functools as ft
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import formats
from ..._array import is_quantized
from ...formats import AbstractFormat, AbstractGGUF
from ...kernels import can_rearrange, rearrange
from .._checkpoint import Entry, struct_of, written
from .._containers import ggml_numbers, ggml_types, Part
from ._architectures import heads_of, is_shifted
from ._base import bits_of, check, Source, to_quantized
from ._registry import register_layout
from ._rows import kind_of, Rows


# The formats by the names of ggml's block types, which are the same.
_named: dict[str, Any] = {
    type.name: getattr(formats, type.name, None) for type in ggml_types.values()
}
block_formats: dict[str, AbstractGGUF] = {
    name: format()  # pyright: ignore
    for name, format in _named.items()
    if isinstance(format, type) and issubclass(format, AbstractGGUF)
}

# Two formats store the same numbers as a block type.
_types: dict[AbstractFormat, str] = dict(
    [
        *((format, kind) for kind, format in block_formats.items()),
        (formats.Int8(32, jnp.float16), "Q8_0"),
        (formats.Int4(32, scale_dtype=jnp.float16), "Q4_0"),
    ]
)


def find_gguf(source: Source) -> Iterator[Entry]:
    """Yields all arrays of a GGUF file. Rows of queries and keys that the architecture
    permutes are restored to their original order, and the one that it adds to norms is
    subtracted."""
    of_matrices = {
        _of_matrix(name) for name, t in source.tensors.items() if t.kind == "NVFP4"
    }
    for name, tensor in source.tensors.items():
        if name in of_matrices:
            continue
        heads = heads_of(name, source.metadata)
        if heads is not None:
            *_, rows = tensor.shape[:1] or (0,)
            if rows % (2 * heads) != 0:
                raise ValueError(
                    f"{name!r} should have {heads} heads, of an even number of rows "
                    f"each. Got {rows} rows."
                )
        if tensor.kind == "NVFP4":
            yield _nvfp4(source, name, tensor, heads)
        else:
            yield _entry(name, tensor, heads, is_shifted(name, source.metadata))


def heads_first(x: Any, heads: int) -> Any:
    """Restores the original order of rows that the architecture permutes."""
    return _by_heads(x, heads).reshape(x.shape)


def _by_heads(x, heads):
    n, *rest = x.shape
    return x.reshape(heads, n // (2 * heads), 2, *rest).swapaxes(1, 2)


def halves_first(x: Any, heads: int) -> Any:
    """The inverse of `heads_first`."""
    n, *rest = x.shape
    return x.reshape(heads, 2, n // (2 * heads), *rest).swapaxes(1, 2).reshape(x.shape)


@ft.partial(jax.jit, static_argnums=0)
def _from_blocks(format, blocks):
    return format.from_blocks(blocks)


def _rows(tensor, heads):
    x = tensor.read()
    return x if heads is None else heads_first(x, heads)


def _entry(name, tensor, heads, shifted):
    rows = ft.partial(_rows, tensor, heads)
    if tensor.dtype is None:
        dtype = np.dtype(np.uint8)
        return Entry(name, tensor.shape, dtype, None, "dense", (tensor,), rows)
    type = ggml_types[ggml_numbers[tensor.kind]]
    if type.is_plain:
        read = (lambda: rows() - tensor.dtype.type(1)) if shifted else rows
        return Entry(name, tensor.shape, tensor.dtype, None, "dense", (tensor,), read)
    format = block_formats.get(tensor.kind)
    *lead, nbytes = tensor.shape
    shape = (*lead, nbytes // type.nbytes * type.block)
    dtype = np.dtype(np.float32)

    def to_array():
        if shifted:
            raise ValueError(
                f"it is of {tensor.kind}, so that the one that llama.cpp adds to norms "
                "cannot be subtracted."
            )
        if format is None:
            raise ValueError(
                f"it is of {tensor.kind}, for which this library has no format. It has "
                f"{', '.join(block_formats)}."
            )
        if write is not None and can_rearrange():
            return written(struct_of(shape, dtype, format, -1), write)
        if isinstance(format, formats.AbstractGGUFBytes):
            # The bytes are stored as in the file, so another copy is not needed.
            stored = format.from_blocks(rows())
        else:
            stored = _from_blocks(format, rows())
        return to_quantized(stored, format, shape, dtype)

    write = _writer(tensor, heads, format, type.nbytes)
    return Entry(name, shape, dtype, format, "gguf", (tensor,), to_array, write=write)


def _writer(tensor, heads, format, nbytes):
    # Returns a function that writes the stored arrays of a matrix to given memory, or
    # `None` if a block is not a plain list of bit fields.
    is_matrix = tensor.ndim > 1 and format is not None and format.row_axis == -1
    if not is_matrix or _fields(format) is None:
        return None

    def write(stored):
        rows = tensor.read()
        rows = rows if heads is None else _by_heads(rows, heads)
        rearrange(rows, nbytes, _fields(format), stored)

    return write


@ft.cache
def _fields(format):
    return format.stored_fields


def _of_matrix(name):
    # Returns the name of the scale of a whole NVFP4 matrix.
    return f"{name.removesuffix('weight')}scale"


def _nvfp4(source, name, tensor, heads):
    # A block has four scales, then 16 codes for each, in eight bytes: the first eight
    # codes are in the low bits. The scale of the matrix is another tensor.
    *lead, nbytes = tensor.shape
    whole = source.tensors.get(_of_matrix(name))
    shape, sizes = (*lead, nbytes // 36 * 64), (*lead[:-1], 1, 1)
    check(
        len(lead) > 0
        and (whole is None or whole.kind == "F32")
        and (whole is None or whole.shape in ((1,), tuple(lead[:-1]))),
        f"{name!r} should be a matrix or a stack of them, with at most one scale each",
        *(tensor, whole),
    )
    dtype, format = np.dtype(np.float32), formats.NVFP4()

    def to_array():
        blocks = _rows(tensor, heads).reshape(*lead, nbytes // 36, 36)
        # ggml ignores the sign of scales, and treats NaN as zero.
        scale = blocks[..., :4].reshape(*lead, nbytes // 9) & np.uint8(127)
        scale = np.where(scale == 127, np.uint8(0), scale)
        halves = blocks[..., 4:].reshape(*lead, nbytes // 9, 8)
        codes = np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=-1)
        codes = codes[..., ::2] | codes[..., 1::2] << np.uint8(4)
        number = np.ones(1, np.float32) if whole is None else whole.read()
        number = number.reshape(sizes if number.size > 1 else (1,) * len(lead))
        stored = {
            "codes": codes.reshape(*lead, nbytes // 36 * 32),
            "scale": scale,
            "global_scale": bits_of(np.broadcast_to(number, sizes).copy()),
        }
        return to_quantized(stored, format, shape, dtype)

    sources = (tensor,) if whole is None else (tensor, whole)
    return Entry(name, shape, dtype, format, "gguf", sources, to_array)


def gguf_parts(name: str, x: Any, metadata: dict[str, Any]) -> dict[str, Part]:
    """Returns the tensor of an array in GGUF. For the architecture in the metadata,
    rows of queries and keys are permuted, and one is added to norms, where llama.cpp
    expects that. Raises a `ValueError` if GGUF has no such format."""
    heads = heads_of(name, metadata)
    if heads is not None and x.shape[0] % (2 * heads) != 0:
        raise ValueError(
            f"{name!r} should have {heads} heads, of an even number of rows each. Got "
            f"shape {x.shape}."
        )
    if len(x.shape) > 4:
        raise ValueError(f"{name!r} should have 4 axes at most. Got shape {x.shape}.")

    def ordered(array):
        return array if heads is None else halves_first(array, heads)

    if not is_quantized(x):
        kind = kind_of(name, x.dtype)
        if kind not in ggml_numbers:
            raise ValueError(
                f"{name!r} cannot be written for GGUF: it is of {x.dtype}."
            )
        if is_shifted(name, metadata):
            # Use 32 bits, because adding one in 16 bits would lose small values.
            more = lambda: np.asarray(x).astype(np.float32) + np.float32(1)
            return {name: Part("F32", tuple(x.shape), more)}
        return {name: Part(kind, tuple(x.shape), lambda: ordered(np.asarray(x)))}
    rows = Rows(name, x, "GGUF")
    if is_shifted(name, metadata):
        raise rows.refused("llama.cpp adds one to the norms of this architecture")
    kind = _type_of(rows.format)
    if kind is None:
        raise rows.refused(
            f"it has {', '.join(str(format) for format in block_formats.values())}"
        )
    if rows.k % rows.format.block_size != 0:
        raise rows.refused(
            f"rows should have a multiple of {rows.format.block_size} numbers"
        )

    def blocks():
        format = block_formats[kind]
        return ordered(np.asarray(_to_blocks(format, rows.all_stored, rows.tail)))

    return {name: Part(kind, rows.shape, blocks)}


def _type_of(format):
    # Options of the encoder do not matter to the stored arrays.
    return "MXFP4" if isinstance(format, formats.MXFP4) else _types.get(format)


@ft.partial(jax.jit, static_argnums=(0, 2))
def _to_blocks(format, stored, tail):
    return format.to_blocks(stored, tail)


register_layout("gguf", find_gguf, container="gguf")
