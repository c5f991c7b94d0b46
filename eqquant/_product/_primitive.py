import dataclasses
import math

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from ..formats import AbstractFormat, EXL3, Layout, Rotated, Stored
from ..kernels import (
    choose,
    is_highest,
    is_portable,
    platforms,
    Problem,
    Product,
    run_compiled,
)
from ._partition import (
    as_declared,
    by_compiler,
    explicit_mesh,
    known_to_compiler,
    over_types,
    Partition,
    split_of_types,
    within_manual,
)
from ._specs import by_types, vary_together


def qmatmul_rows(
    x: Shaped[Array, "*c _"],
    stored: Stored,
    *,
    row_axes: int = 1,
    product: Product,
    layout: Layout,
    sharding: NamedSharding | None = None,
    activation: AbstractFormat | None = None,
    kernel: str | None = None,
    precision: str | None = None,
) -> Shaped[Array, "*d _"]:
    """Multiplies rows with a stored weight: `x[*c, m, k] @ W[*b, n, k].T`, or
    `x[*c, m, n] @ W[*b, n, k]`. Leading axes broadcast as in `jnp.matmul`.

    - `row_axes`: the number of axes of `x` in the place of `m`, which may be zero.
    - `sharding`: the declared sharding of `W[*b, n, k]`.
    - Others: as in [`eqquant.Problem`][].
    """
    if isinstance(layout.format, Rotated):
        others = dict(row_axes=row_axes, sharding=sharding, activation=activation)
        others |= dict(kernel=kernel, precision=precision)
        return _rotated(x, stored, product, layout, layout.format, others)
    if isinstance(layout.format, EXL3):
        others = dict(row_axes=row_axes, sharding=sharding, activation=activation)
        others |= dict(kernel=kernel, precision=precision)
        return _rotated_both(x, stored, product, layout, layout.format, others)
    if layout.panels and explicit_mesh(
        [jax.typeof(a) for a in jtu.tree_leaves(stored)]
    ):
        stored, layout = layout.without_panels(stored), layout.side_by_side
    leaves, treedef = jtu.tree_flatten(stored)
    params = dict(
        treedef=treedef,
        product=product,
        layout=layout,
        sharding=sharding,
        activation=activation,
        kernel=kernel,
        precision=precision,
    )
    stack = layout.shape(stored)[:-2]
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = jnp.stack([x.real, x.imag], -2)
        y = _broadcast(parts, leaves, stack, row_axes + 1, params)
        return lax.complex(y[..., 0, :], y[..., 1, :])
    return _broadcast(x, leaves, stack, row_axes, params)


def _rotated(x, stored, product, layout, rotation, others):
    # The product with the stored rotated weight. The rotations are outside of it, so
    # that products that share an input share its rotation, too.
    layout = dataclasses.replace(layout, format=rotation.format)
    _, dtype = _dtypes_of_rotated(x.dtype, others["precision"])

    def multiply(x):
        x = x.astype(dtype)
        return qmatmul_rows(x, stored, product=product, layout=layout, **others)

    if product == "matmul":
        return multiply(_turned(rotation.rotate, x)).astype(x.dtype)
    return _turned(rotation.rotate_back, multiply(x)).astype(x.dtype)


def _rotated_both(x, stored, product, layout, format, others):
    # The product with the stored codes of a weight whose rows and columns are scaled
    # and rotated. Both are as well outside of it.
    rows = layout.to_rows(stored)
    suh, svh = format.scales(rows)
    before, after = suh, svh.swapaxes(-1, -2)
    if product == "matmul_transposed":
        before, after = after, before
    row_axes, dtype = others["row_axes"], x.dtype
    wide, narrow = _dtypes_of_rotated(dtype, others["precision"])

    def scaled(x, scale):
        *stack, _, k = scale.shape
        lead = x.ndim - row_axes - 1 - len(stack)
        return x * scale.reshape(*[1] * lead, *stack, *[1] * row_axes, k).astype(wide)

    missing = suh.ndim - 1 + row_axes - x.ndim
    x = lax.expand_dims(x.astype(wide), range(max(0, missing)))
    x = _turned(lambda x, scale: format.rotate(scaled(x, scale)), x, before)
    codes, layout = {"codes": rows["codes"]}, Layout(format.tiles)
    x = x.astype(narrow)
    y = qmatmul_rows(x, codes, product=product, layout=layout, **others).astype(wide)
    y = _turned(lambda y, scale: scaled(format.rotate(y), scale), y, after)
    return y.astype(dtype)


def _dtypes_of_rotated(dtype, precision):
    # The dtype of rotations, and the one of products of rotated numbers, which may be
    # too large for float16.
    wide = dtype if dtype.itemsize > 4 else jnp.float32
    is_narrow = dtype == jnp.bfloat16 and not is_highest(precision)
    return wide, dtype if is_narrow else wide


def _turned(turn, x, *others):
    return by_types(turn, jax.typeof(x).sharding)(x, *others)


def _broadcast(x, leaves, stack, row_axes, params):
    # Leading axes that the weight has with another size than one batch the weight; any
    # other leading axis of `x` only adds rows.
    number = x.ndim - row_axes - 1
    batch, matrix = x.shape[:number], x.shape[number:]
    lead = jnp.broadcast_shapes(batch, stack)
    if len(lead) == 0:
        return _bind(x, *leaves, **params)
    first = len(lead) - len(stack)
    present = [first + i for i, size in enumerate(stack) if size == lead[first + i]]
    leaves = [
        lax.squeeze(a, [i for i in range(len(stack)) if first + i not in present])
        for a in leaves
    ]
    x = lax.expand_dims(x, range(len(lead) - number))
    sizes = [lead[i] if i in present else x.shape[i] for i in range(len(lead))]
    x = jnp.broadcast_to(x, (*sizes, *matrix))
    order = [*present, *[i for i in range(len(lead)) if i not in present]]
    rest = range(len(lead), x.ndim)
    y = _bind(x.transpose(*order, *rest), *leaves, **params)
    return y.transpose(*[order.index(i) for i in range(len(lead))], *rest)


def _bind(x, *leaves, **params):
    return qmatmul_p.bind(*vary_together(x, *leaves), **params)


# `x[*b, *rows, k] @ W[*b, n, k].T` or `x[*b, *rows, n] @ W[*b, n, k]`. The operands are
# `x` and the stored arrays of `W`. It is linear in `x`, except for the rounding of
# activations, whose derivative is straight-through. The stored arrays are integers and
# have no derivative.
#
# Why a primitive? A `custom_vjp` has no forward mode, a `custom_vmap` has no transpose,
# and `vmap` of a plain function would read the weight once for each row of the batch.
qmatmul_p = Primitive("qmatmul")
run_compiled(qmatmul_p)


@qmatmul_p.def_abstract_eval
def _abstract(x, *leaves, **params):
    partition = _partition(leaves, **params)
    *_, n, k = partition.w_shape
    old, new = (k, n) if partition.product == "matmul" else (n, k)
    assert x.shape[-1] == old
    y = x.update(shape=(*x.shape[:-1], new), weak_type=False)
    mesh = explicit_mesh([x, *leaves])
    if mesh is None:
        return y
    spec = split_of_types(partition, mesh, [x, *leaves]).y(partition.product)
    return y.update(sharding=NamedSharding(mesh, spec))


def _partition(leaves, *, treedef, product, layout, activation, **params):
    del params
    w_shape = layout.shape(treedef.unflatten(leaves))
    return Partition(product, layout, activation, w_shape)


def problem_of(
    x,
    *leaves,
    platform,
    treedef,
    product,
    layout,
    activation,
    precision,
    portable=False,
    **params,
) -> Problem:
    """Returns the problem that a kernel has to solve, from the operands of a product or
    their avals, and the parameters of the primitive."""
    del params
    *stack, n, k = layout.shape(treedef.unflatten(leaves))
    rows = math.prod(x.shape[len(stack) : -1])
    return Problem(
        product=product,
        platform=platform,
        layout=layout,
        activation=activation,
        rows=rows if isinstance(rows, int) else None,
        n=n,
        k=k,
        stack=math.prod(stack),
        dtype=x.dtype,
        precision=precision,
        portable=portable,
    )


def _on_device(x, leaves, activation, *, kernel, treedef, **params):
    params = params | dict(treedef=treedef, activation=activation)
    problem = problem_of(x, *leaves, **params)
    chosen = choose(problem, kernel).kernel
    # Without a barrier, XLA may decode the weights of all layers of a model at once.
    x, leaves = lax.optimization_barrier((x, leaves))
    number = len(params["layout"].shape(treedef.unflatten(leaves))) - 2
    stack, rows, k = x.shape[:number], x.shape[number:-1], x.shape[-1]
    fn = lambda x, stored: chosen.fn(x, stored, problem)
    for _ in stack:
        fn = jax.vmap(fn)
    y = fn(x.reshape(*stack, math.prod(rows), k), treedef.unflatten(leaves))
    return y.reshape(*stack, *rows, y.shape[-1])


def _lowering(platform):
    def lower(ctx, *operands, sharding, activation, treedef, layout, **params):
        def product(x, *leaves):
            mesh = explicit_mesh(ctx.avals_in)
            rows = layout
            if layout.panels and (inner is not None or found is not None):
                # A weight is not split along the axes of panels.
                rows = layout.side_by_side
                stored = layout.without_panels(treedef.unflatten(leaves))
                leaves = treedef.flatten_up_to(stored)
                if found is not None:
                    whole = NamedSharding(sharding.mesh, PartitionSpec())
                    leaves = lax.with_sharding_constraint(leaves, whole)
            known = dict(treedef=treedef, layout=rows, **params)

            def fn(x, leaves, activation):
                return _on_device(
                    x,
                    leaves,
                    activation,
                    platform=platform,
                    portable=is_portable(ctx.module_context),
                    **known,
                )

            partition = _partition(leaves, activation=activation, **known)
            operands = [x, *leaves]
            if mesh is not None:
                return over_types(partition, fn, mesh, operands)
            if inner is not None:
                return as_declared(partition, fn, inner, operands)
            if found is not None and platform == "tpu":
                return as_declared(partition, fn, sharding, operands)
            if found is not None:
                return by_compiler(partition, fn, operands)
            return fn(x, leaves, activation)

        inner = found = None
        if sharding is not None:
            inner = within_manual(ctx.avals_in, sharding)
            found = known_to_compiler(ctx, sharding.mesh)
        lowered = mlir.lower_fun(product, multiple_results=False)
        return lowered(ctx if found is None else found, *operands)

    return lower


for _platform in platforms:
    mlir.register_lowering(qmatmul_p, _lowering(_platform), platform=_platform)
mlir.register_lowering(qmatmul_p, _lowering("other"))


def _jvp(primals, tangents, **params):
    _, *leaves = primals
    dx, *_ = tangents
    y = qmatmul_p.bind(*primals, **params)
    if isinstance(dx, ad.Zero):
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    params = params | dict(activation=None)
    return y, qmatmul_p.bind(dx, *leaves, **params)


ad.primitive_jvps[qmatmul_p] = _jvp


def _transpose(ct, x, *leaves, product, kernel, activation, **params):
    del activation  # The derivative of rounding is straight-through.
    assert ad.is_undefined_primal(x)
    no_derivative = [None] * len(leaves)
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), *no_derivative]
    params["product"] = "matmul_transposed" if product == "matmul" else "matmul"
    # Only the reference product is certain to exist for both products.
    params["kernel"] = kernel if kernel == "reference" else None
    ct = qmatmul_p.bind(ct, *leaves, activation=None, **params)
    if x.aval.sharding.mesh.explicit_axes:
        ct = jax.sharding.reshard(ct, x.aval.sharding)
    return [ct, *no_derivative]


ad.primitive_transposes[qmatmul_p] = _transpose


def _batch(operands, axes, **params):
    x, *leaves = operands
    x_axis, *leaf_axes = axes
    if all(axis is None for axis in leaf_axes):
        # Only `x` is mapped: the mapped axis adds rows.
        layout, treedef = params["layout"], params["treedef"]
        number = len(layout.shape(treedef.unflatten(leaves))) - 2
        x = jnp.moveaxis(x, x_axis, number)
        return qmatmul_p.bind(x, *leaves, **params), number
    # The weight is mapped: the mapped axis is one more stacked axis.
    size = next(a.shape[i] for a, i in zip(operands, axes) if i is not None)
    operands = [
        jnp.broadcast_to(a, (size, *a.shape))
        if axis is None
        else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(operands, axes)
    ]
    return qmatmul_p.bind(*operands, **params), 0


batching.primitive_batchers[qmatmul_p] = _batch
