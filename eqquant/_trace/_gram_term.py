import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from ._meeting import Meeting
from ._view import Index, picked


# Sums of the inputs of a product over their rows: `x^T x`, or its diagonal. Sums are in
# float32, and their factors are not rounded.


def gram_term(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    met: Meeting,
    diagonal: bool,
    second: Any = None,
    pick: Index | None = None,
    sharded: bool = False,
) -> tuple[Shaped[Array, "..."], Shaped[Array, "..."]]:
    """Returns the term that a product adds to the Gram of a leaf, with one matrix for
    each index of the axes `met.over`, and the number of rows of each matrix. The term
    is `x^T y`, where `y` is `second`, or `x` if `second` is `None`. If rows `pick`
    their matrices, there is one matrix for each index of the axis along which they
    pick. The axes of the rows are joined; if the arrays are `sharded`, only where their
    types prove that this keeps them split: XLA would gather an array that is split
    along another axis than the first."""
    x = _within(jnp.asarray(operands[met.other]), met)
    y = x if second is None else _within(second, met)
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _gram_term(eqn, operands, met, diagonal, x, y, pick, sharded)
    # The weight is real, so the real and the imaginary part are rows that it meets.
    (real, rows), (imaginary, _) = (
        _gram_term(eqn, operands, met, diagonal, part(x), part(y), pick, sharded)
        for part in (jnp.real, jnp.imag)
    )
    return real + imaginary, rows


def _within(x, met):
    for axis, start, size in met.windows:
        x = lax.slice_in_dim(_gathered(x), start, start + size, axis=axis)
    return x


def _gram_term(eqn, operands, met, diagonal, x, y, pick, sharded):
    name = eqn.primitive.name
    ragged = name not in ("dot_general", "conv_general_dilated")
    sizes = _gathered(jnp.asarray(operands[2])) if ragged else None

    def rows_of(x):
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
            x = x.astype(jnp.float32)
        if name == "conv_general_dilated":
            return _patches(eqn, _gathered(x))
        return _gathered(x) if ragged else x

    x, y = rows_of(x), rows_of(y)
    if pick is not None:
        order, sizes = _by_pick(met, pick, x)
        x, y = (_rows_of_picks(_gathered(a), met)[order] for a in (x, y))
        gram = _ragged(x, y, sizes, 1, diagonal)
    elif name == "dot_general":
        columns, batch = met.columns, met.batch
        if not sharded or _is_split_first(x, met):
            x, y = (_as_matrices(a, met) for a in (x, y))
            columns, batch = (x.ndim - 1 - met.other,), tuple(range(len(batch)))
        gram = _gram(x, y, columns, batch, diagonal)
    elif name == "conv_general_dilated":
        gram = _gram(x, y, (2,), (1,), diagonal)
        gram = gram if met.over else gram[0]
    else:
        (column,) = met.columns
        gram = _ragged(x, y, sizes, column, diagonal)
    if sizes is not None:
        return gram, sizes.astype(jnp.float32)
    lead = gram.shape[: len(met.over)]
    again = _repeats(gram, met)
    rows = jnp.full(lead, met.rows // again, jnp.float32)
    # Under `shard_map`, devices with their own rows have their own numbers of rows.
    varying = tuple(jax.typeof(gram).manual_axis_type.varying)
    return gram, lax.pcast(rows, varying, to="varying") if varying else rows


def _repeats(gram, met):
    # The caller sums the rows of repeated axes when it adds this to a Gram.
    sizes = zip(gram.shape, met.over)
    return math.prod(n for n, dim in sizes if any(f.axis < 0 for f in dim))


def _is_split_first(x, met):
    # Whether the types say that rows and columns are split along the first of their
    # axes.
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or sharding.mesh.auto_axes:
        return False
    rest = [i for i in range(x.ndim) if i not in (*met.columns, *met.batch)]
    others = (*rest[1:], *met.columns[1:])
    return all(sharding.spec[i] is None for i in others)


def _as_matrices(x, met):
    """Returns the other operand of a product as `*batch rows k`, or as `*batch k rows`
    if it is the second. XLA:CPU brings the operands of products into this order. With
    one axis of rows, it then needs no copy in another order for `x^T x`."""
    rest = [i for i in range(x.ndim) if i not in (*met.columns, *met.batch)]
    axes = (met.columns, rest) if met.other else (rest, met.columns)
    groups = [*([i] for i in met.batch), *axes]
    sizes = [math.prod(x.shape[i] for i in each) for each in groups]
    place = _placed(x, [each[0] if each else None for each in groups])
    x = lax.transpose(x, [i for each in groups for i in each])
    return lax.reshape(x, sizes, out_sharding=place)


def _gram(x, y, columns, batch, diagonal):
    rest = [i for i in range(x.ndim) if i not in (*columns, *batch)]
    k = math.prod(x.shape[i] for i in columns)
    lead = [x.shape[i] for i in batch]
    if diagonal:
        order = (*batch, *rest, *columns)
        x, y = (lax.transpose(a, order).astype(jnp.float32) for a in (x, y))
        axes = tuple(range(len(batch), len(batch) + len(rest)))
        total = jnp.sum(x * y, axes)
        return _gathered(total).reshape(*lead, k)
    n, m = len(batch), len(columns)
    gram = lax.dot_general(
        x,
        y,
        ((rest, rest), (batch, batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
        out_sharding=_whole(x, n + 2 * m),
    )
    # Free axes come out in the order in which they are in `x`.
    order = np.argsort(np.argsort(columns)).tolist()
    first, second = [n + i for i in order], [n + m + i for i in order]
    return lax.transpose(gram, (*range(n), *first, *second)).reshape(*lead, k, k)


def _patches(eqn, x):
    # The rows that a convolution multiplies its filters with, for each group.
    params = eqn.params
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    window = [eqn.invars[1].aval.shape[i] for i in numbers.rhs_spec[2:]]
    patches = lax.conv_general_dilated_patches(
        lax.transpose(x, numbers.lhs_spec),
        window,
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        precision=lax.Precision.HIGHEST,
    )
    k = patches.shape[1] // groups
    return jnp.moveaxis(patches, 1, -1).reshape(-1, groups, k)


def _rows_of_picks(x, met):
    """Returns the rows of the inputs, each repeated for every matrix picked for it."""
    rest = [i for i in range(x.ndim) if i not in (*met.columns, *met.batch)]
    x = lax.transpose(x, (*met.batch, *rest, *met.columns))
    lead = x.shape[: len(met.batch)]
    k = math.prod(x.shape[x.ndim - len(met.columns) :])
    x = x.reshape(math.prod(lead), 1, -1, k)
    again = math.prod(f.size for f in met.free if f.axis == picked)
    return jnp.broadcast_to(x, (x.shape[0], again, *x.shape[2:])).reshape(-1, k)


def _by_pick(met, pick, x):
    """Returns the order that sorts these rows by their picks, and the number of rows
    for each pick."""
    # The indices, in the order of the axes of the gathered array.
    over = [f for dim in met.over for f in dim]
    factors = [f for f in (*over, *met.free) if f.axis == picked]
    strides = np.argsort([-f.stride for f in factors])
    chosen = _gathered(jnp.asarray(pick.value))[..., pick.column]
    chosen = chosen.reshape([factors[i].size for i in strides])
    chosen = lax.transpose(chosen, np.argsort(strides).tolist())
    # Broadcast over batch axes that repeat the same pick, and over all rows.
    of_batch = iter(chosen.shape)
    shape = [next(of_batch) if f.axis == picked else 1 for f in over]
    again = math.prod(of_batch)
    chosen = chosen.reshape(*shape, again)
    chosen = jnp.broadcast_to(chosen, (*(f.size for f in over), again))
    used = {*met.columns, *met.batch}
    rest = math.prod(n for i, n in enumerate(x.shape) if i not in used)
    chosen = jnp.repeat(chosen.reshape(-1), rest)
    number = pick.factor.size
    chosen = jnp.clip(chosen, 0, number - 1)
    return jnp.argsort(chosen), jnp.bincount(chosen, length=number).astype(jnp.int32)


def _ragged(x, y, sizes, column, diagonal):
    row = 1 - column
    groups = sizes.shape[0]
    if diagonal:
        x, y = (lax.transpose(a, (row, column)).astype(jnp.float32) for a in (x, y))
        places = jnp.arange(x.shape[0], dtype=sizes.dtype)
        group = jnp.searchsorted(jnp.cumsum(sizes), places, side="right")
        return jax.ops.segment_sum(x * y, group, groups)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((row,), (row,)), ((), ())),
        lhs_ragged_dimensions=[row],
        rhs_group_dimensions=[],
    )
    return lax.ragged_dot_general(
        x,
        y,
        sizes,
        numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _whole(x, rank):
    # With explicit sharding, JAX asks for the sharding of a result. (Mapped functions
    # need a spec with an entry for each axis.)
    mesh = jax.typeof(x).sharding.mesh
    spec = PartitionSpec(*[None] * rank)
    return NamedSharding(mesh, spec) if mesh.explicit_axes else None


def _placed(x, axes):
    # The sharding of an array whose axes are split like these axes of `x`.
    sharding = jax.typeof(x).sharding
    spec = PartitionSpec(*[None if i is None else sharding.spec[i] for i in axes])
    return sharding.update(spec=spec) if sharding.mesh.explicit_axes else None


def _gathered(x):
    whole = _whole(x, x.ndim)
    return x if whole is None else jax.sharding.reshard(x, whole)
