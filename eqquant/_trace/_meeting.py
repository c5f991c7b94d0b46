import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from ._pieces import Piece, piece_of
from ._view import Factor, joined, merged, picked, repeated, View


class Meeting(NamedTuple):
    """How a view enters a product.

    - `other`: the place of the other operand.
    - `contracted`: the axes of the leaf that are contracted, in order.
    - `columns`, `batch`: the axes of the other operand that are contracted with these,
        and its batch axes.
    - `over`: for each batch axis, the factors of the leaf.
    - `rows`: the number of rows of the other operand that meet one matrix.
    - `free`: for a plain product, the factors of the axes of the view that are neither
        contracted nor batch axes.
    - `piece`: the contracted part of these axes, if not all of them are contracted.
    - `windows`: `(axis, start, size)` of each contracted axis of the other operand of
        which only `size` indices from `start` on meet the leaf.
    """

    other: int
    contracted: tuple[int, ...]
    columns: tuple[int, ...]
    batch: tuple[int, ...]
    over: tuple[tuple[Factor, ...], ...]
    rows: int
    free: tuple[Factor, ...] | None = None
    piece: Piece | None = None
    windows: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the contracted part is known."""
        return self.piece is None or self.piece.is_known


products = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")


def meeting(
    eqn: JaxprEqn, place: int, view: View, shape: Sequence[int]
) -> Meeting | None:
    """Returns how a view of a leaf of this `shape`, the operand at `place`, enters a
    product of `products`, or `None` if the product does not contract axes of the leaf,
    or parts of them."""
    name = eqn.primitive.name
    if name == "dot_general":
        return _dot(eqn, place, view, shape)
    if place != 1:
        return None
    return (_conv if name == "conv_general_dilated" else _ragged)(eqn, view, shape)


def _dot(eqn, place, view, shape):
    contracted, batch = eqn.params["dimension_numbers"]
    columns, over = contracted[1 - place], batch[1 - place]
    windows = []
    dims = [_dim(view, i, j, windows) for i, j in zip(contracted[place], columns)]
    # Two axes of the value may be the halves of one axis of the leaf.
    order = sorted(
        range(len(dims)), key=lambda i: [(f.axis, -f.stride) for f in dims[i]]
    )
    factors = merged([f for i in order for f in dims[i]])
    axes = tuple(f.axis for f in factors)
    if dims and not axes:
        axes = _of_size_one(shape)
    if not axes or min(axes) < 0 or len({*axes}) < len(axes):
        return None
    x = eqn.invars[1 - place].aval.shape
    rows = [n for i, n in enumerate(x) if i not in (*columns, *over)]
    found = tuple(view.dims[i] for i in batch[place])
    # Along a repeated axis, the same matrix meets more rows.
    again = [f.size for dim in found for f in dim if f.axis in (repeated, picked)]
    columns = tuple(int(columns[i]) for i in order)
    over = tuple(int(i) for i in over)
    used = {*contracted[place], *batch[place]}
    free = tuple(f for i, dim in enumerate(view.dims) if i not in used for f in dim)
    rows = math.prod(rows + again)
    piece = piece_of(factors, shape, found, free, view.at)
    return Meeting(
        1 - place, axes, columns, over, found, rows, free, piece, tuple(windows)
    )


def _dim(view, i, column, windows):
    # The factors of an axis. A concatenation contributes the factors of the leaf.
    dim = view.dims[i]
    joint = dim[0] if len(dim) == 1 and dim[0].axis == joined else None
    if joint is None or joint.inner is None or joint.start is None:
        return dim
    windows.append((int(column), joint.start, joint.inner.size))
    return (joint.inner,)


def _conv(eqn, view, shape):
    numbers = eqn.params["dimension_numbers"]
    if eqn.params["batch_group_count"] != 1:
        return None
    axes = _axes([f for i in numbers.rhs_spec[1:] for f in view.dims[i]], shape)
    out = eqn.outvars[0].aval.shape
    rows = math.prod(n for i, n in enumerate(out) if i != numbers.out_spec[1])
    # With groups, each group of filters meets its own channels.
    groups = eqn.params["feature_group_count"]
    out_dim = view.dims[numbers.rhs_spec[0]]
    over = ()
    if groups > 1:
        n = eqn.invars[1].aval.shape[numbers.rhs_spec[0]]
        if len(out_dim) != 1 or out_dim[0].stride != 1 or out_dim[0].axis < 0:
            return None
        over = ((Factor(out_dim[0].axis, groups, n // groups),),)
    return None if axes is None else Meeting(0, axes, (), (), over, rows)


def _ragged(eqn, view, shape):
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (columns, contracted), (over, batch) = numbers.dot_dimension_numbers
    groups = numbers.rhs_group_dimensions
    axes = _axes([f for i in contracted for f in view.dims[i]], shape)
    if axes is None or over or batch or len(groups) != 1 or len(columns) != 1:
        return None
    (ragged,) = numbers.lhs_ragged_dimensions
    rows = eqn.invars[0].aval.shape[ragged]
    found = (view.dims[groups[0]],)
    return Meeting(0, axes, tuple(columns), (), found, rows)


def _axes(factors, shape):
    # Each axis has to be contracted as a whole.
    factors = merged(factors)
    if any(f.axis < 0 or f.size != shape[f.axis] for f in factors):
        return None
    return tuple(f.axis for f in factors) or _of_size_one(shape) or None


def _of_size_one(shape):
    # If only axes of size one are contracted, any of them will do.
    return tuple(i for i, n in enumerate(shape) if n == 1)[-1:]


def stacked(met: Meeting, view: View, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes of the leaf along which each index meets its own inputs."""
    each = [f for dim in met.over for f in dim if f.axis >= 0]
    over = {f.axis for f in each if f.size == shape[f.axis]}
    left = {f.axis for dim in view.dims for f in dim}
    chosen = {index.factor.axis for index in view.at} - left
    return tuple(sorted(over | chosen))


def lead(met: Meeting, view: View, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the number of different inputs that meet the leaf along each axis that is
    not contracted. A number between one and the size of the axis divides the axis into
    equal parts. `None` if the inputs cannot be told apart in this way."""
    sizes = {}
    over = met.over
    if met.piece is not None:
        if not met.is_known or any(index.many for index in view.at):
            return None
        over = [dim for i, dim in enumerate(over) if i != met.piece.batch]
    found = [index.factor for index in view.at]
    if any(index.many for index in view.at) and not _each_picked(met):
        return None
    for dim in over:
        if picked in {f.axis for f in dim}:
            continue
        factors = [f for f in dim if f.axis != repeated]
        if len(factors) > 1 or len(factors) != len(dim):
            return None
        found += factors
    for f in found:
        if f.axis < 0 or f.axis in sizes or f.size * f.stride != shape[f.axis]:
            return None
        sizes[f.axis] = f.size
    others = [i for i in range(len(shape)) if i not in met.contracted]
    return tuple(sizes.get(i, 1) for i in others)


def _each_picked(met):
    # Whether each row of the other operand meets the matrix picked for it, or repeated
    # matrices.
    kinds = [{f.axis for f in dim} for dim in met.over]
    return met.free is not None and all(k <= {repeated} or k == {picked} for k in kinds)
