from collections.abc import Iterator

from .._checkpoint import Entry
from ._base import Source
from ._registry import register_layout


_part = "_weight_qdata"


def find_torchao(source: Source) -> Iterator[Entry]:
    """No array. Those of torchao, `_weight_qdata` with scales and what the metadata of
    the file says of its own classes, are not read, nor are they what they seem to be.

    **Raises:**

    A `ValueError` if there is one.
    """
    for name in source.tensors:
        prefix = name.removesuffix(_part)
        if prefix != name and f"{prefix}_weight_scale" in source.tensors:
            raise ValueError(
                f"'{prefix}weight' is of torchao, as {name!r} shows, which this "
                "library does not read. Save it from there as compressed-tensors, or "
                "dequantized."
            )
    yield from ()


register_layout("torchao", find_torchao)
