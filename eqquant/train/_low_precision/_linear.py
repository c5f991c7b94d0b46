import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ..._product import by_types, codes_of, vary_together
from ...kernels import run_compiled
from ._contractions import contract, transposes
from ._dots import Kind, result, result_sharding
from ._operand import Operand, Rounding


@dataclasses.dataclass(frozen=True)
class Linear:
    """A product of a training step, as a value.

    - `kind`, `stack`, `rounding`, `dtype`: as in `contract`.
    - `cotangent`: how the transpose rounds its argument.
    - `treedef`: the structure of the operand and of the delayed scales of the
        cotangent, or `None`.
    """

    kind: Kind
    stack: int
    rounding: Rounding
    cotangent: Rounding
    dtype: Any
    treedef: Any

    def __call__(self, x: Array, *leaves: Array) -> Array:
        # Otherwise XLA might decode the operand in the forward pass, and keep the
        # result.
        x, leaves = lax.optimization_barrier((x, leaves))
        operand, delayed = self.treedef.unflatten(leaves)
        return contract(
            self.kind, x, operand, self.stack, self.rounding, self.dtype, delayed
        )


def linear(
    x: Float[Array, "..."],
    operand: Operand,
    *,
    kind: Kind,
    stack: int,
    cotangent: Rounding,
    dtype: Any,
    delayed: Float[Array, "*b"] | None = None,
) -> Float[Array, "..."]:
    """Computes one of the products, without rounding. It is linear in `x`, and rounds
    its cotangent, with `delayed` scales if its rounding is `Delayed`."""
    leaves, treedef = jtu.tree_flatten((operand, delayed))
    fn = Linear(kind, stack, None, cotangent, jnp.dtype(dtype), treedef)
    return linear_p.bind(*vary_together(x, *leaves), fn=fn, sharding=None)


# Why a primitive? The transpose of a product has to see all its rows at once, even if
# `vmap` maps a function of one row, and its own rounding has to be part of it. With
# `custom_vjp`, `vmap` would multiply row by row, and there is no forward mode.
linear_p = Primitive("rounded_product")
run_compiled(linear_p)


@linear_p.def_abstract_eval
def _abstract(x, *leaves, fn, sharding):
    operand, _ = fn.treedef.unflatten(leaves)
    shape = result(fn.kind, fn.stack, x.shape, operand.shape)
    y = x.update(shape=shape, dtype=fn.dtype, weak_type=False)
    if not x.sharding.mesh.explicit_axes:
        return y
    if sharding is None:
        sharding = result_sharding(fn.kind, fn.stack, x, codes_of(operand.stored))
    return y.update(sharding=sharding)


def _lower(ctx, *operands, fn, sharding):
    del sharding
    (out,) = ctx.avals_out
    lowered = mlir.lower_fun(by_types(fn, out.sharding), multiple_results=False)
    return lowered(ctx, *operands)


mlir.register_lowering(linear_p, _lower)


def _jvp(primals, tangents, *, fn, sharding):
    _, *leaves = primals
    dx, *_ = tangents
    y = linear_p.bind(*primals, fn=fn, sharding=sharding)
    if isinstance(dx, ad.Zero):
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    # The derivative of rounding is straight-through.
    fn = dataclasses.replace(fn, rounding=None)
    return y, linear_p.bind(dx, *leaves, fn=fn, sharding=sharding)


ad.primitive_jvps[linear_p] = _jvp


def _transpose(ct, x, *leaves, fn, sharding):
    del sharding
    assert ad.is_undefined_primal(x)
    no_derivative = [None] * len(leaves)
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), *no_derivative]
    fn = dataclasses.replace(
        fn,
        kind=transposes[fn.kind],
        rounding=fn.cotangent,
        cotangent=None,
        dtype=x.aval.dtype,
    )
    typed = x.aval.sharding if x.aval.sharding.mesh.explicit_axes else None
    return [linear_p.bind(ct, *leaves, fn=fn, sharding=typed), *no_derivative]


ad.primitive_transposes[linear_p] = _transpose


def _batch(operands, axes, *, fn, sharding):
    x, *leaves = operands
    x_axis, *leaf_axes = axes
    stack = fn.stack
    _, delayed_axis = fn.treedef.unflatten(leaf_axes)
    number = fn.treedef.children()[0].num_leaves
    size = next(a.shape[i] for a, i in zip(operands, axes) if i is not None)
    out = 0
    if fn.kind in ("along", "across") and all(axis is None for axis in leaf_axes):
        # The weight is not mapped, so the mapped axis adds rows.
        out, operands = stack, [jnp.moveaxis(x, x_axis, stack), *leaves]
    elif fn.kind == "spread" and x_axis is None and delayed_axis is None:
        leaves, delayed = leaves[:number], leaves[number:]
        leaves = [_moved(a, i, stack, size) for a, i in zip(leaves, leaf_axes)]
        out, operands = stack, [x, *leaves, *delayed]
    else:
        # Otherwise the mapped axis stacks products.
        operands = [_moved(a, i, 0, size) for a, i in zip(operands, axes)]
        fn = dataclasses.replace(fn, stack=stack + 1)
    if sharding is not None:
        spec = (*sharding.spec[:out], None, *sharding.spec[out:])
        sharding = sharding.update(spec=PartitionSpec(*spec))
    return linear_p.bind(*operands, fn=fn, sharding=sharding), out


def _moved(a, axis, to, size):
    if axis is None:
        shape = (*a.shape[:to], size, *a.shape[to:])
        return jnp.broadcast_to(jnp.expand_dims(a, to), shape)
    return jnp.moveaxis(a, axis, to)


batching.primitive_batchers[linear_p] = _batch
