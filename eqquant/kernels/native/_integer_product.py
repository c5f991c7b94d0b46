import functools as ft
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, Int8 as Int8Array

from ...formats import Int8, Layout
from .._eager import run_compiled
from .._problem import Problem
from ..cpu._xla import fuses
from . import _library as library
from ._export import is_portable
from ._weight import call, weight


def integer_product(
    x: Int8Array[Array, "..."],
    w: Int8Array[Array, "..."],
    *,
    stack: int = 0,
    across: bool = False,
) -> Float[Array, "..."]:
    """Multiplies 8-bit integers: `x[*b, *r, k]` with `w[*b, n, k]`; or, if `across`,
    `x[*b, *r, n]` with `w[*b, n, k]`. The result is exact up to rounding to float32.
    Sums of more than 1024 products may be rounded in parts. `*b` are `stack` axes.

    XLA computes it, or on a CPU where the native library is faster, the library.
    """
    return integer_product_p.bind(x, w, stack=stack, across=across)


# The largest number of products of two integers up to 128 whose sum fits into 32 bits.
_most = (2**31 - 1) // 128**2

# (A primitive, so that `vmap` only adds rows.)
integer_product_p = Primitive("integer_product")
run_compiled(integer_product_p)


@integer_product_p.def_abstract_eval
def _abstract(x, w, *, stack, across):
    assert x.dtype == w.dtype == jnp.int8 and x.ndim > stack
    assert x.shape[-1] == w.shape[-2 if across else -1]
    shape = (*x.shape[:-1], w.shape[-1 if across else -2])
    return x.update(shape=shape, dtype=jnp.dtype(jnp.float32), weak_type=False)


def _by_parts(fn, x, w, across):
    """Sums the products of parts, each of which fits into 32 bits."""
    size, axis = x.shape[-1], w.ndim - (2 if across else 1)
    parts = []
    for start in range(0, max(size, 1), _most):
        cut = ft.partial(
            lax.slice_in_dim, start_index=start, limit_index=min(start + _most, size)
        )
        parts.append(fn(cut(x, axis=x.ndim - 1), cut(w, axis=axis)))
    return ft.reduce(operator.add, parts)


def _xla(x, w, *, stack, across, cpu):
    batch = tuple(range(stack))
    contracted = (x.ndim - 1,), (stack if across else stack + 1,)

    def dot(x, w):
        dims = contracted, (batch, batch)
        if not cpu:
            # On GPUs, XLA gives wrong numbers (as of JAX 0.11.2) unless the size of the
            # contracted axes is a multiple of four.
            x, w = (_in_fours(a, axis) for a, (axis,) in zip((x, w), contracted))
        y = lax.dot_general(x, w, dims, preferred_element_type=jnp.int32)
        return y.astype(jnp.float32)

    return _by_parts(dot, x, w, across)


def _in_fours(a, axis):
    more = [-n % 4 if i == axis else 0 for i, n in enumerate(a.shape)]
    return jnp.pad(a, [(0, n) for n in more])


def _matrices(x, w, *, stack, across):
    lead, rows = x.shape[:stack], x.shape[stack:-1]

    def dot(x, w):
        shape = *x.shape[:-1], w.shape[-1 if across else -2]
        result = jax.ShapeDtypeStruct(shape, jnp.float32)
        function = jax.ffi.ffi_call("eqquant_int8_matrices", result)
        return function(x, w, across=across, set=np.int32(library.number_of_set()))

    x = x.reshape(*lead, math.prod(rows), x.shape[-1])
    y = _by_parts(dot, x, w, across)
    return y.reshape(*lead, *rows, y.shape[-1])


def _rounded(x, w, *, stack, across):
    if not across:
        w = w.mT  # The library reads the contracted axis first.
    *rows, k = x.shape[stack:]
    lead, n = x.shape[:stack], w.shape[-1]

    def dot(x, w):
        problem = Problem(
            product="matmul",
            platform="cpu",
            layout=Layout(Int8(), 0, -1),
            activation=Int8(),
            rows=x.shape[0],
            n=n,
            k=x.shape[1],
            stack=1,
            dtype=np.dtype(np.float32),
            precision=None,
        )
        ones = jnp.full((1, n), np.float32(1).view(np.uint32))
        unit = jnp.ones((x.shape[0], 1), jnp.float32)
        stored = {"codes": w, "scale": ones}
        return call("int8", x, weight(stored, problem), n, unit)

    fn = ft.partial(_by_parts, dot, across=True)
    for _ in range(stack):
        fn = jax.vmap(fn)
    y = fn(x.reshape(*lead, math.prod(rows), k), w)
    return y.reshape(*lead, *rows, n)


# The least number of rows for which the library's products are faster than XLA's, with
# AVX2 alone. With AVX512, XLA's products are as fast since JAX 0.11.
_matrix_rows = 32


def _lower(ctx, x, w, *, cpu, **params):
    module = ctx.module_context
    alone = not isinstance(module.axis_context, mlir.ShardingContext)
    alone = alone or module.axis_context.num_devices == 1
    native = (
        cpu
        and alone
        and not is_portable(module)
        and library.missing() is None
        and all(math.prod(a.shape) for a in ctx.avals_in)
    )
    rows = math.prod(ctx.avals_in[0].shape[params["stack"] : -1])
    fn = ft.partial(_xla, cpu=cpu)
    matrices = (
        native and library.has("int8_matrices") and "avx512" not in library.features()
    )
    if matrices and rows >= _matrix_rows:
        fn = _matrices
    elif native and library.has("int8") and not fuses:
        fn = _rounded
    fn = ft.partial(fn, **params)
    return mlir.lower_fun(fn, multiple_results=False)(ctx, x, w)


mlir.register_lowering(integer_product_p, ft.partial(_lower, cpu=True), platform="cpu")
mlir.register_lowering(integer_product_p, ft.partial(_lower, cpu=False))


def _batch(operands, axes, *, stack, across):
    x, w = operands
    if axes[1] is None:
        # The mapped axis adds rows.
        x = jnp.moveaxis(x, axes[0], stack)
        return integer_product_p.bind(x, w, stack=stack, across=across), stack
    size = w.shape[axes[1]]
    first = lambda a, i: (
        jnp.broadcast_to(a, (size, *a.shape)) if i is None else jnp.moveaxis(a, i, 0)
    )
    x, w = map(first, operands, axes)
    return integer_product_p.bind(x, w, stack=stack + 1, across=across), 0


batching.primitive_batchers[integer_product_p] = _batch
