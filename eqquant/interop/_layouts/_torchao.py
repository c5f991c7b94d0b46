from collections.abc import Iterator

from .._checkpoint import Entry
from ._base import Source
from ._registry import register_layout


_part = "_weight_qdata"


def find_torchao(source: Source) -> Iterator[Entry]:
    """Finds no array. Those of torchao, `_weight_qdata` with scales, cannot be read:
    their meaning depends on classes of torchao that the metadata names.

    **Raises:**

    A `ValueError` if there is one.
    """
    for name in source.tensors:
        prefix = name.removesuffix(_part)
        if prefix != name and f"{prefix}_weight_scale" in source.tensors:
            raise ValueError(
                f"'{prefix}weight' is of torchao, as {name!r} shows, which cannot be "
                "read. Save it with torchao as compressed-tensors, or dequantized."
            )
    yield from ()


register_layout("torchao", find_torchao)
