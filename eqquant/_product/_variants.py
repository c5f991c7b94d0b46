import dataclasses
from collections.abc import Callable

from ..formats import AbstractFormat


def nearest_format(
    format: AbstractFormat, fits: Callable[[AbstractFormat], bool]
) -> AbstractFormat | None:
    """Returns the same format with another packing of codes, or with smaller blocks,
    that fits. `None` if there is none."""
    names = {field.name for field in dataclasses.fields(format)}
    variants = [format]
    if "radix" in names:
        variants.append(dataclasses.replace(format, radix=4))
    if "block_size" in names and format.block_size is not None:
        sizes = range(format.block_size, 0, -16)
        variants = [
            dataclasses.replace(v, block_size=size) for size in sizes for v in variants
        ]
    return next(filter(fits, variants), None)
