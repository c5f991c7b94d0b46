import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from ._placement import as_entry, names_of, splits_evenly
from .formats import AbstractFormat, by_row
from .kernels import Product


# The names of the axes of a mesh that an axis of an array is split over.
Names = tuple[str, ...]


class Split(NamedTuple):
    """Over which axes of a mesh a product is split, along each of its axes."""

    stack: tuple[Names, ...]
    rows: tuple[Names, ...]
    n: Names
    k: Names

    @property
    def names(self) -> set[str]:
        return {
            name
            for names in (*self.stack, *self.rows, self.n, self.k)
            for name in names
        }

    def contracted(self, product: Product) -> Names:
        return self.k if product == "matmul" else self.n

    def x(self, product: Product) -> PartitionSpec:
        return _spec(*self.stack, *self.rows, self.contracted(product))

    def y(self, product: Product) -> PartitionSpec:
        out = self.n if product == "matmul" else self.k
        return _spec(*self.stack, *self.rows, out)

    def leaf(self, shape: Sequence[int], row_axis: int) -> PartitionSpec:
        """Of a stored array of this shape."""
        entries = by_row((*self.stack, self.n, self.k), row_axis)
        return _spec(*[() if i == 1 else names for i, names in zip(shape, entries)])


def _spec(*entries: Names) -> PartitionSpec:
    return PartitionSpec(*map(as_entry, entries))


def without(spec: PartitionSpec, entry: Any) -> PartitionSpec:
    """What is left of a spec without some names."""
    names = names_of(entry)
    return _spec(*[tuple(i for i in names_of(e) if i not in names) for e in spec])


def split(
    x: Sequence[Any],
    w: Sequence[Any],
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    sizes: Mapping[str, int],
    format: AbstractFormat,
) -> Split:
    """How to split a product, from the specs of `x[*b, *rows, _]` and `W[*b, n, k]`.

    What `x` has for its rows stays where it is: if the weight is split over the same
    axes then its codes are gathered. The rest is split as the weight is. Splits that
    would leave parts of different sizes, or cut through a block, are given up.
    """
    used = set()

    def take(entry, size, fits=lambda shards: True):
        taken = ()
        for name in names_of(entry):
            shards = math.prod(sizes[i] for i in (*taken, name))
            if name in used or size % shards != 0 or not fits(shards):
                break
            taken = (*taken, name)
        used.update(taken)
        return taken

    *w_stack, n, k = w
    number = len(w_stack)
    *stack_shape, n_size, k_size = w_shape
    stack = tuple(take(i, size) for i, size in zip(x, stack_shape))
    rows = tuple(map(take, x[number:-1], x_shape[number:-1]))
    stack = tuple(
        names or take(i, size) for names, i, size in zip(stack, w_stack, stack_shape)
    )
    along = lambda shards: splits_evenly(format, w_shape[:-1], k_size, shards)
    return Split(stack, rows, take(n, n_size), take(k, k_size, along))
