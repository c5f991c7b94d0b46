import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._array import is_quantized
from ...formats import AbstractFormat, Int4, Int8
from .._containers import ggml_numbers
from .._layouts import block_formats, halves_first, heads_of
from ._part import kind_of, Part, Rows


# The last two are the same by other names.
_kinds: dict[AbstractFormat, str] = dict(
    [
        *((format, kind) for kind, format in block_formats.items()),
        (Int8(32, jnp.float16), "Q8_0"),
        (Int4(32, scale_dtype=jnp.float16), "Q4_0"),
    ]
)


def gguf_parts(name: str, x: Any, metadata: dict[str, Any]) -> dict[str, Part]:
    """An array as GGUF has it. Rows of queries and keys are put in the order of the
    architecture that the metadata tells of.

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
    kind = _kinds.get(rows.format)
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
