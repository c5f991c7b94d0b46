import math
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, Shaped

from ..._product import codes_of, vary_together
from ...formats import from_bits, MXFP4, MXFP8, NVFP4, reciprocal
from ...kernels import blackwell, run_compiled
from ._dots import dims_of, floats
from ._operand import Operand


# Products of microscaled numbers, whose blocks lie along contracted axes. GPUs of
# NVIDIA since Blackwell have instructions for these. `lax.scaled_dot` becomes a
# composite, that is, an operation together with its definition by other operations.
# When it compiles a composite, XLA chooses among cuDNN, Triton and products of the
# decoded numbers. (`jax.nn.scaled_matmul` calls one library, and `jax.export` cannot
# write it.)


def is_microscaled(x: Operand, w: Operand) -> bool:
    """Whether devices may have instructions for the product `X[*b, *r, k]` with
    `W[*b, n, k]`: it has whole blocks, with scales of one kind."""
    kinds = {_kind(operand) for operand in (x, w)}
    return None not in kinds and len(kinds) == 1 and blackwell()


def _kind(operand):
    format = operand.layout.format
    if not isinstance(format, MXFP4 | MXFP8 | NVFP4):
        return None
    k = operand.shape[-1]
    if k == 0 or k % format.block_size != 0:
        return None
    return "nv" if isinstance(format, NVFP4) else "mx"


def microscaled(x: Operand, w: Operand, stack: int, dtype: Any) -> Float[Array, "..."]:
    """Computes the product, by `lax.scaled_dot` if it is compiled for CUDA."""
    leaves, treedef = jtu.tree_flatten((x, w))
    return microscaled_p.bind(
        *vary_together(*leaves), treedef=treedef, stack=stack, dtype=jnp.dtype(dtype)
    )


# A primitive, since `vmap` of `lax.scaled_dot` would repeat an unmapped weight, and
# since the platform of a program is only known when it is lowered.
microscaled_p = Primitive("microscaled_product")
run_compiled(microscaled_p)


@microscaled_p.def_abstract_eval
def _abstract(*leaves, treedef, stack, dtype):
    del stack
    x, w = treedef.unflatten(leaves)
    shape = (*x.shape[:-1], w.shape[-2])
    return codes_of(x.stored).update(shape=shape, dtype=dtype, weak_type=False)


def _batch(leaves, axes, *, treedef, stack, dtype):
    size = next(a.shape[i] for a, i in zip(leaves, axes) if i is not None)
    number = treedef.children()[0].num_leaves
    # With an unmapped weight, the mapped axis adds rows; otherwise it stacks products.
    shared = all(axis is None for axis in axes[number:])
    out = stack if shared else 0
    moved = [
        jnp.moveaxis(batching.bdim_at_front(a, i, size), 0, out)
        for a, i in zip(leaves, axes)
    ]
    if shared:
        moved[number:] = leaves[number:]
    else:
        stack += 1
    y = microscaled_p.bind(*moved, treedef=treedef, stack=stack, dtype=dtype)
    return y, out


batching.primitive_batchers[microscaled_p] = _batch


def _lowering(cuda):
    def lower(ctx, *leaves, treedef, stack, dtype):
        fits = cuda and _is_for_one(ctx.module_context)

        def fn(*leaves):
            x, w = treedef.unflatten(leaves)
            if fits:
                return scaled(x, w, stack, dtype)
            dims = dims_of("along", len(x.shape), stack)
            return floats(x.decode(), w.decode(), dims, dtype)

        return mlir.lower_fun(fn, multiple_results=False)(ctx, *leaves)

    return lower


mlir.register_lowering(microscaled_p, _lowering(cuda=True), platform="cuda")
mlir.register_lowering(microscaled_p, _lowering(cuda=False))


def _is_for_one(module):
    """Whether a program is for one platform, and each device runs it by itself. (JAX
    writes no composite for several platforms, and XLA might gather operands that it
    would have to split.)"""
    if len(module.platforms) != 1:
        return False
    context = module.axis_context
    if isinstance(context, mlir.ShardingContext):
        return context.num_devices == 1
    if not isinstance(context, mlir.SPMDAxisContext):
        return False
    mesh = context.mesh
    return mesh.size == 1 or set(context.manual_axes) == set(mesh.axis_names)


def scaled(x: Operand, w: Operand, stack: int, dtype: Any) -> Float[Array, "..."]:
    """Computes the product by `lax.scaled_dot`."""
    *lead, k = x.shape
    batch = (math.prod(lead[:stack]),) if stack > 0 else ()  # XLA takes one batch axis.
    (a, a_scale), (b, b_scale) = elements(x), elements(w)
    rows, columns = math.prod(lead[stack:]), b.shape[-2]
    flat = lambda a, number: a.reshape(*batch, number, a.shape[-1])
    last, first = len(batch) + 1, tuple(range(len(batch)))
    y = lax.scaled_dot(
        flat(a, rows),
        flat(b, columns),
        lhs_scale=flat(a_scale, rows),
        rhs_scale=flat(b_scale, columns),
        dimension_numbers=(((last,), (last,)), (first, first)),
        preferred_element_type=jnp.float32,
    )
    y = y.reshape(*lead, columns)
    for of_rows in _of_tensor(x):
        y = y * of_rows
    for of_all in _of_tensor(w):
        # One scale for each matrix of the stack.
        y = y * lax.expand_dims(of_all[..., 0, 0], range(stack, y.ndim))
    return y.astype(dtype)


def elements(
    operand: Operand,
) -> tuple[Shaped[Array, "*r k"], Shaped[Array, "*r g"]]:
    """Returns the numbers of an operand, and the scale of each block, as floats of 8 or
    4 bits. (`NVFP4` also has a scale for the matrix.)"""
    format, stored = operand.layout.format, operand.stored
    assert isinstance(format, MXFP4 | MXFP8 | NVFP4)
    codes = format.base.unpack(stored["codes"], operand.layout.tail)
    if isinstance(format, MXFP8):
        found = lax.bitcast_convert_type(codes, format.dtype)
    else:
        found = lax.bitcast_convert_type(codes.astype(jnp.uint4), jnp.float4_e2m1fn)
    is_nv = isinstance(format, NVFP4)
    kind = jnp.float8_e4m3fn if is_nv else jnp.float8_e8m0fnu
    return found, lax.bitcast_convert_type(stored["scale"], kind)


def _of_tensor(operand):
    """Returns the scale of a matrix, if it has one."""
    format = operand.layout.format
    if not isinstance(format, NVFP4):
        return []
    scale = from_bits(operand.stored["global_scale"], format.scale_dtype)
    return [reciprocal(scale) if format.inverse else scale]
