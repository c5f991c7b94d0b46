import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

from ._view import Index


@dataclasses.dataclass(frozen=True)
class Product:
    """A product that a leaf enters.

    - `contracted`: the axes of the leaf that are contracted.
    - `whole`: whether they are contracted as a whole, and not in part.
    - `rows`: the number of rows of the other operand that meet one matrix at a time.
    - `input`: equal for products whose other operand is the same value, contracted
        along the same axes.
    - `stacked`: the axes of the leaf that are not axes of the matrix: an index was
        chosen along them, or each index meets its own inputs.
    - `sources`: the numbers of the arguments that the other operand depends on.
    """

    contracted: tuple[int, ...]
    rows: int
    input: Hashable
    stacked: tuple[int, ...]
    sources: frozenset[int]
    whole: bool = True

    @property
    def is_by_inputs(self) -> bool:
        """Whether the other operand depends on anything but the first argument, which
        is the model. Constants of the program count as inputs."""
        return self.sources != {0}


class Step(NamedTuple):
    """The index of any step of a scan. `number` is the number of the scan."""

    number: int
    reverse: bool


class Known(NamedTuple):
    """The index of a step that was unrolled."""

    index: int


class Site(NamedTuple):
    """A product in a program, as one leaf enters it.

    - `product`: the product.
    - `place`: the number of the equation of the program that is the product, or
        contains it.
    - `order`: grows along the program.
    - `lead`: the number of different inputs along each axis of the leaf that is not
        contracted; `None` if they cannot be told apart.
    - `at`: the indices that were chosen along axes of the leaf. An index that a scan
        chose is a `Step`, or `Known`.
    - `inside`: the loops and branches around it. A scan is its `Step`.
    - `is_known`: whether the contracted part is known.
    """

    product: Product
    place: int
    order: int
    lead: tuple[int, ...] | None
    at: tuple[Index, ...]
    inside: tuple[Hashable, ...]
    is_known: bool = True
