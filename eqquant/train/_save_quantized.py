from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, PyTree

from .._array import check_number, held, is_quantized
from ..formats import AbstractExact, AbstractFormat, as_format, Int8
from ._kept import keep, Kept


def save_quantized(
    fn: Callable[..., Any],
    format: AbstractFormat | str = Int8(32),
    *,
    min_size: int = 1024,
) -> Callable[..., Any]:
    """`jax.checkpoint` with arguments in fewer bits: only the arguments of `fn` are
    kept for the backward pass, rounded to a format, and the backward pass computes the
    rest again.

    The results are those of `fn`. The gradients are those of `fn` at the rounded
    arguments. Arguments without derivatives, such as a mask, are kept exactly. If a row
    of an argument has numbers of two ranges, one above 256 and at least 64 times the
    other, such as scores of which masked ones are -1e9, each range is rounded by
    itself; infinities become the largest numbers of the dtype.

    A small number may be rounded to zero: if `fn` divides by an argument, or takes its
    logarithm or root, the gradient may then be infinite. Keep such a step out of `fn`,
    or add a small number to the argument first.

    !!! Example

        ```python
        def loss(model, x, y):
            for layer in model.layers:
                x = eqquant.train.save_quantized(jax.vmap(layer))(x)
            return jnp.mean((x - y) ** 2)
        ```

    **Arguments:**

    - `fn`: a function that JAX can trace, such as a layer. The arrays that it closes
        over, and the arrays of modules (`fn` itself or its arguments), are kept
        unrounded, since they are in memory anyway.
    - `format`: the format of the kept arguments, with blocks along the last axis.
    - `min_size`: arguments with fewer elements are kept unrounded, and so are arguments
        that are not of a real floating-point dtype or that are not differentiated.

    **Returns:**

    A function of the same arguments. It has no forward-mode derivatives.

    **Raises:**

    A `ValueError` for a format of a few integers, such as [`eqquant.RSRBinary`][].

    ??? cite "Reference"

        ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed
        Training. Chen et al., 2021.
    """
    if not callable(fn):
        raise TypeError(f"`fn` should be a function. Got {type(fn).__name__}.")
    format = as_format(format)
    check_number("min_size", min_size)
    if isinstance(format, AbstractExact):
        raise ValueError(
            f"`format` should round any number. Got {format}, which stores "
            f"{format.domain_text} only."
        )
    return eqx.module_update_wrapper(_SaveQuantized(held(fn), format, min_size))


class _SaveQuantized(eqx.Module):
    fn: Callable[..., Any]
    format: AbstractFormat = eqx.field(static=True)
    min_size: int = eqx.field(static=True)

    @property
    def __wrapped__(self):
        return self.fn

    def __get__(self, instance, owner):
        # Binds methods to their instance.
        return self if instance is None else eqx.Partial(self, instance)

    def __call__(self, *args, **kwargs):
        given = args, kwargs
        # The closure of `fn` may be differentiated, too: it becomes part of a tree. (A
        # function without a closure, but with defaults, would not be converted.)
        fn = lambda *args, **kwargs: self.fn(*args, **kwargs)
        fn = eqx.filter_closure_convert(fn, *args, **kwargs)
        packs = lambda x: _is_packed(x, self.min_size)
        inputs, rest = eqx.partition(given, packs, is_leaf=_is_module)
        floats, rest = eqx.partition((fn, rest), eqx.is_inexact_array)
        others, static = eqx.partition(rest, eqx.is_array)
        static_out: Any = None

        def call(inputs, floats, others):
            nonlocal static_out
            fn, rest = eqx.combine(floats, others, static)
            args, kwargs = eqx.combine(inputs, rest)
            out, static_out = eqx.partition(fn(*args, **kwargs), eqx.is_array)
            return out

        def forward(inputs, floats, others):
            packed = jtu.tree_map(lambda x: _packed(x, self.format), inputs)
            floats, others = jtu.tree_map(lambda x: x.value, (floats, others))
            inputs = jtu.tree_map(lambda x: x.value, inputs)
            # Otherwise XLA would continue, and round the arguments of many layers at
            # once.
            inputs, packed = lax.optimization_barrier((inputs, packed))
            return call(inputs, floats, others), (packed, floats, others)

        def backward(residuals, cotangent):
            packed, floats, others = residuals
            cotangent = jtu.tree_map(_instantiated, cotangent, is_leaf=_is_zero)
            packed, cotangent = _together(packed, cotangent)
            dense = lambda x: x.dense() if _is_kept(x) else x
            inputs = jtu.tree_map(dense, packed, is_leaf=_is_kept)
            fn = lambda inputs, floats: call(inputs, floats, others)
            _, pullback = jax.vjp(fn, inputs, floats)
            return *pullback(cotangent), None

        saved = jax.custom_vjp(call)
        saved.defvjp(forward, backward, symbolic_zeros=True)
        out = saved(inputs, floats, others)
        return eqx.combine(out, static_out)


def _packed(x, format):
    return keep(x.value, format) if x.perturbed else x.value


def _is_kept(x):
    return isinstance(x, Kept)


def _is_zero(x):
    return isinstance(x, SymbolicZero)


def _instantiated(x):
    return jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x


# Before JAX 0.11, XLA ignores barriers on CPUs.
_barriers = jax.__version_info__ >= (0, 11)


def _together(packed: PyTree, cotangent: PyTree) -> tuple[PyTree, PyTree]:
    """Returns both unchanged, but XLA decodes nothing before the cotangent is known."""
    packed, cotangent = lax.optimization_barrier((packed, cotangent))
    scalars = [] if _barriers else [*map(_scalar, jtu.tree_leaves(cotangent))]
    scalars = [scalar for scalar in scalars if scalar is not None]
    if scalars:
        bits = _bits(scalars[0])
        # This is zero, but XLA does not know it.
        zero = bits * (bits - 1) & 1
        held = lambda x: _with_bits(x, zero) if is_quantized(x) else x
        packed = jtu.tree_map(held, packed, is_leaf=is_quantized)
    return packed, cotangent


def _scalar(x: Any) -> Array | None:
    # (A single number of an array with a sharded type has no sharding.)
    is_float = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
    if not is_float or x.size == 0 or any(jax.typeof(x).sharding.spec):
        return None
    return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())


def _with_bits(q: PyTree, bits: Array) -> PyTree:
    """Adds bits to the smallest stored array of a quantized array."""
    leaves, treedef = jtu.tree_flatten(q)
    i = min(range(len(leaves)), key=lambda i: leaves[i].size)
    old = _bits(leaves[i])
    new = old | bits.astype(old.dtype)
    leaves[i] = lax.bitcast_convert_type(new, leaves[i].dtype)
    return jtu.tree_unflatten(treedef, leaves)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)


def _is_packed(x: Any, min_size: int) -> bool:
    is_float = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
    return is_float and x.ndim > 0 and x.size >= min_size
