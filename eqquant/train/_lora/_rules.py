import functools as ft

import jax.numpy as jnp
from jax import lax

from ..._implicit import add_rule
from ._array import LoRA


# Rules of `implicit` for weights with adapters: products multiply by the base, and by
# the thin matrices. All other primitives take the adapted weight.


@add_rule(
    "dot_general",
    of=LoRA,
    takes="dimension_numbers precision preferred_element_type",
    out_sharding=None,
)
def _dot_general(interpreter, eqn, values):
    first, second = values
    w_first = not isinstance(second, LoRA)
    x, w = (second, first) if w_first else (first, second)
    (x_contracted, w_contracted), (x_batch, w_batch) = eqn.params["dimension_numbers"]
    if w_first:
        x_contracted, w_contracted = w_contracted, x_contracted
        x_batch, w_batch = w_batch, x_batch
    stack, outs, ins = w.matrix.split(range(w.ndim))
    if (
        isinstance(x, LoRA)
        or w.magnitude is not None
        or list(w_batch) != list(stack)
        or sorted(w_contracted) != list(ins)
    ):
        return NotImplemented
    (y,) = interpreter.apply(eqn, [w.frozen, x] if w_first else [x, w.frozen])
    x = jnp.asarray(interpreter.dequantize(x, eqn))
    x, a, b = (z.astype(y.dtype) for z in (x, w.a, w.b))
    rank, number = a.shape[-2], len(stack)
    a = a.reshape(*w.matrix.stack, rank, *w.matrix.ins)
    b = b.reshape(*w.matrix.stack, *w.matrix.outs, rank)
    along = [number + 1 + ins.index(i) for i in w_contracted]
    dot = ft.partial(lax.dot_general, precision=eqn.params["precision"])
    thin = dot(x, a, ((x_contracted, along), (x_batch, range(number))))
    last = thin.ndim - 1, b.ndim - 1
    operands, last = ((b, thin), last[::-1]) if w_first else ((thin, b), last)
    batch = (range(number), range(number))
    more = dot(*operands, ((last[:1], last[1:]), batch))
    return [y + w.scale * more]


@add_rule(
    "conv_general_dilated",
    of=LoRA,
    takes="dimension_numbers window_strides padding lhs_dilation rhs_dilation "
    "precision preferred_element_type",
    feature_group_count=1,
    batch_group_count=1,
    out_sharding=None,
)
def _conv(interpreter, eqn, values):
    x, w = values
    numbers = eqn.params["dimension_numbers"]
    out, feature = numbers.rhs_spec[0], numbers.out_spec[1]
    if isinstance(x, LoRA) or w.magnitude is not None:
        return NotImplemented
    _, outs, ins = w.matrix.split(range(w.ndim))
    if list(outs) != [out] or len(ins) != w.ndim - 1:
        return NotImplemented
    (y,) = interpreter.apply(eqn, [x, w.frozen])
    x = jnp.asarray(interpreter.dequantize(x, eqn))
    x, a, b = (z.astype(y.dtype) for z in (x, w.a, w.b))
    # A convolution to `rank` channels, followed by a pointwise one to all of them.
    params = {k: v for k, v in eqn.params.items() if k != "out_sharding"}
    a = jnp.moveaxis(a.reshape(a.shape[0], *w.matrix.ins), 0, out)
    thin = lax.conv_general_dilated(x, a, **params)
    contracted = ((feature,), (1,))
    more = lax.dot_general(thin, b, (contracted, ((), ())), eqn.params["precision"])
    return [y + w.scale * jnp.moveaxis(more, -1, feature)]


@add_rule("transpose", of=LoRA, takes="permutation")
def _transpose(interpreter, eqn, values):
    (w,) = values
    *lead, a, b = range(w.ndim)
    swapped = [int(i) for i in eqn.params["permutation"]] == [*lead, b, a]
    return [w.mT] if swapped and w.axis in (-1, -2) else NotImplemented
