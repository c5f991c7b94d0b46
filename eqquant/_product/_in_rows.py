import math

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Shaped


def in_rows(x: Shaped[Array, "*s"]) -> Shaped[Array, "*s"]:
    """Returns the same array, with its last axis contiguous in memory.

    XLA would implement a transpose as a change of layout, and run later operations in
    that layout; on a CPU, a reduction over a strided axis takes several times as long.
    (In a program that is partitioned over devices this does nothing: XLA would gather
    the array before it applies the constraint.)
    """
    return _in_rows_p.bind(x)


def transposed(x: Shaped[Array, "*b m n"]) -> Shaped[Array, "*b n m"]:
    """Returns the same array with its last two axes swapped, in memory too.

    On a CPU, XLA would read from all rows in turn, and these often fall into the same
    places of its caches. So this swaps 16 rows at a time.
    """
    *lead, m, n = x.shape
    step = math.gcd(m, 16)
    strips = in_rows(x.reshape(*lead, m // step, step, n).swapaxes(-1, -2))
    return in_rows(strips.swapaxes(-2, -3)).reshape(*lead, n, m)


_in_rows_p = Primitive("in_rows")
_in_rows_p.def_impl(lambda x: x)
_in_rows_p.def_abstract_eval(lambda x: x)


def _lower(ctx, x):
    module = ctx.module_context
    context = module.axis_context
    if not isinstance(context, mlir.ShardingContext) or context.num_devices != 1:
        return [x]
    # Exported programs cannot hold layout constraints.
    if module.lowering_parameters.for_export:
        return [x]

    def lay(x):
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return mlir.lower_fun(lay, multiple_results=False)(ctx, x)


def _batch(args, axes):
    (x,), (axis,) = args, axes
    return in_rows(jnp.moveaxis(x, axis, 0)), 0


def _jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return in_rows(x), tangent


mlir.register_lowering(_in_rows_p, _lower)
batching.primitive_batchers[_in_rows_p] = _batch
ad.primitive_jvps[_in_rows_p] = _jvp
