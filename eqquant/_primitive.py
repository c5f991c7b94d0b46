import functools as ft
import math

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Shaped

from .formats import AbstractFormat, shape_of, Stored
from .kernels import choose, platforms, Problem, Product


def qmatmul_rows(
    x: Shaped[Array, "*c m _"],
    stored: Stored,
    *,
    product: Product,
    format: AbstractFormat,
    tail: int,
    row_axis: int,
    activation: AbstractFormat | None = None,
    kernel: str | None = None,
    precision: str | None = None,
) -> Shaped[Array, "*d m _"]:
    """The product of rows with a stored weight: `x[*c, m, k] @ W[*b, n, k].T`, or
    `x[*c, m, n] @ W[*b, n, k]`. Leading axes broadcast, as those of `jnp.matmul`.
    """
    leaves, treedef = jtu.tree_flatten(stored)
    params = dict(
        treedef=treedef,
        product=product,
        format=format,
        tail=tail,
        row_axis=row_axis,
        activation=activation,
        kernel=kernel,
        precision=precision,
    )
    stack = shape_of(format, stored, tail, row_axis)[:-2]
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        m = x.shape[-2]
        y = _broadcast(jnp.concatenate([x.real, x.imag], -2), leaves, stack, params)
        return lax.complex(y[..., :m, :], y[..., m:, :])
    return _broadcast(x, leaves, stack, params)


def _broadcast(x, leaves, stack, params):
    # A product of matrices, mapped over every leading axis. Whether such an axis stands
    # for more rows or for more weights is for the batching rule to say.
    batch = x.shape[:-2]
    lead = jnp.broadcast_shapes(batch, stack)
    x_axes = _mapped_axes(batch, lead)
    leaf_axes = _mapped_axes(stack, lead)
    fn = ft.partial(_bind, **params)
    for i, j in zip(reversed(x_axes), reversed(leaf_axes)):
        fn = jax.vmap(fn, in_axes=(i, *[j] * len(leaves)))
    leaves = [_drop_unmapped(leaf, leaf_axes, len(stack)) for leaf in leaves]
    return fn(_drop_unmapped(x, x_axes, len(batch)), *leaves)


def _mapped_axes(shape, lead):
    missing = len(lead) - len(shape)
    present = [0 if a == b else None for a, b in zip(shape, lead[missing:])]
    return [None] * missing + present


def _drop_unmapped(a, axes, number):
    present = axes[len(axes) - number :]
    return lax.squeeze(a, [i for i, axis in enumerate(present) if axis is None])


def _bind(x, *leaves, **params):
    return qmatmul_p.bind(*_vary_together(x, *leaves), **params)


def _vary_together(*operands):
    # Under `shard_map`, every operand must vary over the axes that any of them does;
    # the transpose of making `x` vary is the sum over shards that its cotangent needs.
    varying = [jax.typeof(a).manual_axis_type.varying for a in operands]
    every = frozenset().union(*varying)
    return [
        lax.pcast(a, tuple(sorted(every - axes)), to="varying") if every - axes else a
        for a, axes in zip(operands, varying)
    ]


# `x[*b, m, k] @ W[*b, n, k].T` or `x[*b, m, n] @ W[*b, n, k]`, of `x` and the stored
# arrays of `W`. It is linear in `x`, up to the rounding of activations, the derivative
# of which is straight-through. The stored arrays are integers, and have no derivative.
#
# Why a primitive? A `custom_vjp` has no forward mode, a `custom_vmap` has no transpose,
# and `vmap` of any plain function would read the weight once for each row of the batch.
qmatmul_p = Primitive("qmatmul")


@qmatmul_p.def_impl
def _impl(*operands, **params):
    with jax.disable_jit(False):  # or this would call itself
        return _compiled(**params)(*operands)


@ft.cache
def _compiled(**params):
    return jax.jit(ft.partial(qmatmul_p.bind, **params))


def _sizes(leaves, treedef, format, tail, row_axis):
    *stack, n, k = shape_of(format, treedef.unflatten(leaves), tail, row_axis)
    return math.prod(stack), n, k


@qmatmul_p.def_abstract_eval
def _abstract(x, *leaves, treedef, product, format, tail, row_axis, **params):
    del params
    _, n, k = _sizes(leaves, treedef, format, tail, row_axis)
    old, new = (k, n) if product == "matmul" else (n, k)
    assert x.shape[-1] == old
    return x.update(shape=(*x.shape[:-1], new), weak_type=False)


def problem_of(
    x,
    *leaves,
    platform,
    treedef,
    product,
    format,
    tail,
    row_axis,
    activation,
    precision,
    **params,
) -> Problem:
    """What a product asks of a kernel, from its operands or their avals."""
    del params
    stack, n, k = _sizes(leaves, treedef, format, tail, row_axis)
    rows = x.shape[-2]
    return Problem(
        product=product,
        platform=platform,
        format=format,
        tail=tail,
        row_axis=row_axis,
        activation=activation,
        rows=rows if isinstance(rows, int) else None,
        n=n,
        k=k,
        stack=stack,
        dtype=x.dtype,
        precision=precision,
    )


def _lower(x, *leaves, kernel, treedef, **params):
    problem = problem_of(x, *leaves, treedef=treedef, **params)
    chosen, _ = choose(problem, kernel)
    # Or else XLA may decode the weights of every layer of a model at once.
    x, leaves = lax.optimization_barrier((x, leaves))
    fn = lambda x, stored: chosen.fn(x, stored, problem)
    for _ in range(x.ndim - 2):
        fn = jax.vmap(fn)
    return fn(x, treedef.unflatten(leaves))


def _lowering(platform):
    return mlir.lower_fun(ft.partial(_lower, platform=platform), multiple_results=False)


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


def _transpose(ct, x, *leaves, product, kernel, **params):
    assert ad.is_undefined_primal(x)
    no_derivative = [None] * len(leaves)
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), *no_derivative]
    params["product"] = "matmul_transposed" if product == "matmul" else "matmul"
    # Only the reference product is sure to exist for both.
    params["kernel"] = kernel if kernel == "reference" else None
    return [qmatmul_p.bind(ct, *leaves, **params), *no_derivative]


ad.primitive_transposes[qmatmul_p] = _transpose


def _batch(operands, axes, **params):
    x, *leaves = operands
    x_axis, *leaf_axes = axes
    if all(axis is None for axis in leaf_axes):
        # More rows.
        x = jnp.moveaxis(x, x_axis, -3)
        *stack, size, m, k = x.shape
        y = qmatmul_p.bind(x.reshape(*stack, size * m, k), *leaves, **params)
        return y.reshape(*stack, size, m, y.shape[-1]), len(stack)
    # More weights.
    size = next(a.shape[i] for a, i in zip(operands, axes) if i is not None)
    operands = [
        jnp.broadcast_to(a, (size, *a.shape))
        if axis is None
        else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(operands, axes)
    ]
    return qmatmul_p.bind(*operands, **params), 0


batching.primitive_batchers[qmatmul_p] = _batch
