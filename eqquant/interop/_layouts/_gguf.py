import functools as ft
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ... import formats
from ...formats import AbstractFormat
from .._checkpoint import Entry
from .._containers import ggml_numbers, ggml_types
from ._base import bits_of, check, Source, to_quantized


# By the names of ggml's types, those that are in blocks.
block_formats: dict[str, AbstractFormat] = {
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
    "TQ1_0": formats.TQ1_0(),
    "TQ2_0": formats.TQ2_0(),
    "MXFP4": formats.MXFP4(),
}

# In which the two halves of each head of queries and of keys, which are rotated against
# each other, alternate. (Where they came from, one follows the other.)
_interleaved = {"llama"}
_rotated = re.compile(r"blk\.(?P<layer>\d+)\.attn_(?P<which>[qk])\.(weight|bias)")


def find_gguf(source: Source) -> Iterator[Entry]:
    """All arrays of a file of GGUF, by their names in it. Rows of queries and keys that
    were put in another order for the architecture are in their first order again."""
    of_matrices = {
        _of_matrix(name) for name, t in source.tensors.items() if t.kind == "NVFP4"
    }
    for name, tensor in source.tensors.items():
        if name in of_matrices:
            continue
        heads = heads_of(name, source.config)
        if heads is not None:
            *_, rows = tensor.shape[:1] or (0,)
            if rows % (2 * heads) != 0:
                raise ValueError(
                    f"{name!r} should have {heads} heads, each of an even number of "
                    f"rows. Got {rows} rows."
                )
        if tensor.kind == "NVFP4":
            yield _nvfp4(source, name, tensor, heads)
        else:
            yield _entry(name, tensor, heads)


def heads_first(x: Any, heads: int) -> Any:
    """Rows as they were, from how the architecture has them."""
    n, *rest = x.shape
    return x.reshape(heads, n // (2 * heads), 2, *rest).swapaxes(1, 2).reshape(x.shape)


def halves_first(x: Any, heads: int) -> Any:
    """The inverse of `heads_first`."""
    n, *rest = x.shape
    return x.reshape(heads, 2, n // (2 * heads), *rest).swapaxes(1, 2).reshape(x.shape)


def heads_of(name: str, metadata: dict[str, Any]) -> int | None:
    """How many heads the rows of an array belong to, if they are in another order."""
    architecture = metadata.get("general.architecture")
    found = _rotated.fullmatch(name)
    if architecture not in _interleaved or found is None:
        return None
    key = f"{architecture}.attention.head_count"
    count = metadata.get(key)
    if found["which"] == "k":
        # Without it, there are as many as for queries.
        count = metadata.get(f"{key}_kv", count)
    layer = int(found["layer"])
    if isinstance(count, list) and layer < len(count):
        count = count[layer]
    if type(count) is not int or count < 1:
        raise ValueError(
            f"{name!r} has rows in another order. What it was cannot be known without "
            f"the number of heads, in the metadata {key!r}. Got {count!r}."
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
                f"it is of {tensor.kind}, of which this library has no format. Those "
                f"that it has are {', '.join(block_formats)}."
            )
        return to_quantized(_from_blocks(format, rows()), format, shape, dtype)

    return Entry(name, shape, dtype, format, "gguf", (tensor,), to_array)


def _of_matrix(name):
    # The scale of an array of NVFP4.
    return f"{name.removesuffix('weight')}scale"


def _nvfp4(source, name, tensor, heads):
    # Four scales, and then 16 codes for each of them: the first eight in the low bits
    # of the bytes. What a matrix is multiplied with is a tensor of its own.
    *lead, nbytes = tensor.shape
    whole = source.tensors.get(_of_matrix(name))
    shape, sizes = (*lead, nbytes // 36 * 64), (*lead[:-1], 1, 1)
    check(
        len(lead) > 0
        and (whole is None or whole.kind == "F32")
        and (whole is None or whole.shape in ((1,), tuple(lead[:-1]))),
        f"{name!r} should be a matrix, or several, with a scale for each, if any",
        *(tensor, whole),
    )
    dtype, format = np.dtype(np.float32), formats.NVFP4()

    def to_array():
        blocks = _rows(tensor, heads).reshape(*lead, nbytes // 36, 36)
        # Of no sign; and what is NaN elsewhere is zero.
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
