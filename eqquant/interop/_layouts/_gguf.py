import functools as ft
import re
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
from ._base import bits_of, check, Source, to_quantized
from ._registry import register_layout
from ._rows import kind_of, Rows


# By the names of ggml's block types.
block_formats: dict[str, AbstractGGUF] = {
    "Q1_0": formats.Q1_0(),
    "Q2_0": formats.Q2_0(),
    "Q4_0": formats.Q4_0(),
    "Q4_1": formats.Q4_1(),
    "Q5_0": formats.Q5_0(),
    "Q5_1": formats.Q5_1(),
    "Q8_0": formats.Q8_0(),
    "Q2_K": formats.Q2_K(),
    "Q3_K": formats.Q3_K(),
    "Q4_K": formats.Q4_K(),
    "Q5_K": formats.Q5_K(),
    "Q6_K": formats.Q6_K(),
    "IQ1_S": formats.IQ1_S(),
    "IQ1_M": formats.IQ1_M(),
    "IQ2_XXS": formats.IQ2_XXS(),
    "IQ2_XS": formats.IQ2_XS(),
    "IQ2_S": formats.IQ2_S(),
    "IQ3_XXS": formats.IQ3_XXS(),
    "IQ3_S": formats.IQ3_S(),
    "IQ4_NL": formats.IQ4_NL(),
    "IQ4_XS": formats.IQ4_XS(),
    "TQ1_0": formats.TQ1_0(),
    "TQ2_0": formats.TQ2_0(),
    "MXFP4": formats.MXFP4(),
}

# Two formats store the same numbers as a block type.
_types: dict[AbstractFormat, str] = dict(
    [
        *((format, kind) for kind, format in block_formats.items()),
        (formats.Int8(32, jnp.float16), "Q8_0"),
        (formats.Int4(32, scale_dtype=jnp.float16), "Q4_0"),
    ]
)

# Architectures for which llama.cpp interleaves the two halves of each head of queries
# and keys, between which RoPE rotates. (In the original models, one follows the other.)
_interleaved = {"llama"}
_rotated = re.compile(r"blk\.(?P<layer>\d+)\.attn_(?P<which>[qk])\.(weight|bias)")


def find_gguf(source: Source) -> Iterator[Entry]:
    """All arrays of a GGUF file, by their names. Rows of queries and keys that the
    architecture permutes are in their original order."""
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
            yield _entry(name, tensor, heads)


def heads_first(x: Any, heads: int) -> Any:
    """Rows in their original order, from that of the architecture."""
    return _by_heads(x, heads).reshape(x.shape)


def _by_heads(x, heads):
    n, *rest = x.shape
    return x.reshape(heads, n // (2 * heads), 2, *rest).swapaxes(1, 2)


def halves_first(x: Any, heads: int) -> Any:
    """The inverse of `heads_first`."""
    n, *rest = x.shape
    return x.reshape(heads, 2, n // (2 * heads), *rest).swapaxes(1, 2).reshape(x.shape)


def heads_of(name: str, metadata: dict[str, Any]) -> int | None:
    """The number of heads of an array whose rows are permuted; `None` of others."""
    architecture = metadata.get("general.architecture")
    found = _rotated.fullmatch(name)
    if architecture not in _interleaved or found is None:
        return None
    key = f"{architecture}.attention.head_count"
    count = metadata.get(key)
    if found["which"] == "k":
        # By default, keys have as many heads as queries.
        count = metadata.get(f"{key}_kv", count)
    layer = int(found["layer"])
    if isinstance(count, list) and layer < len(count):
        count = count[layer]
    if type(count) is not int or count < 1:
        raise ValueError(
            f"{name!r} has permuted rows. To restore their order takes the number of "
            f"heads, in the metadata {key!r}. Got {count!r}."
        )
    return count


@ft.partial(jax.jit, static_argnums=0)
def _from_blocks(format, blocks):
    return format.from_blocks(blocks)


def _rows(tensor, heads):
    x = tensor.read()
    return x if heads is None else heads_first(x, heads)


def _entry(name, tensor, heads):
    rows = ft.partial(_rows, tensor, heads)
    type = ggml_types[ggml_numbers[tensor.kind]]
    if type.is_plain:
        return Entry(name, tensor.shape, tensor.dtype, None, "dense", (tensor,), rows)
    format = block_formats.get(tensor.kind)
    *lead, nbytes = tensor.shape
    shape = (*lead, nbytes // type.nbytes * type.block)
    dtype = np.dtype(np.float32)

    def to_array():
        if format is None:
            raise ValueError(
                f"it is of {tensor.kind}, for which this library has no format. It has "
                f"{', '.join(block_formats)}."
            )
        if write is not None and can_rearrange():
            return written(struct_of(shape, dtype, format, -1), write)
        if isinstance(format, formats.AbstractGGUFBytes):
            # As they are in the file, without another copy of them.
            stored = format.from_blocks(rows())
        else:
            stored = _from_blocks(format, rows())
        return to_quantized(stored, format, shape, dtype)

    write = _writer(tensor, heads, format, type.nbytes)
    return Entry(name, shape, dtype, format, "gguf", (tensor,), to_array, write=write)


def _writer(tensor, heads, format, nbytes):
    # What writes the stored arrays of a matrix to given memory, if the bits of a block
    # are those of its elements.
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
    # The name of the scale of a whole NVFP4 matrix.
    return f"{name.removesuffix('weight')}scale"


def _nvfp4(source, name, tensor, heads):
    # A block is four scales, and then 16 codes for each: the first eight are in the low
    # bits of eight bytes. The scale of the matrix is another tensor.
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
        # ggml ignores the sign of scales, and takes NaN to be zero.
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
    """The tensor of an array in GGUF. Rows of queries and keys are permuted as the
    architecture in the metadata has them.

    **Raises:**

    A `ValueError` if GGUF has no such format.
    """
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
        return {name: Part(kind, tuple(x.shape), lambda: ordered(np.asarray(x)))}
    rows = Rows(name, x, "GGUF")
    kind = _types.get(rows.format)
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


@ft.partial(jax.jit, static_argnums=(0, 2))
def _to_blocks(format, stored, tail):
    return format.to_blocks(stored, tail)


register_layout("gguf", find_gguf, container="gguf")
