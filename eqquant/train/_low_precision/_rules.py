import jax.numpy as jnp
from jax import lax

from ..._implicit import add_rule, bind
from ..._product import as_tuple
from ._rounded_conv import Convolution, rounded_conv
from ._rounded_dot import is_rounded, rounded_dot
from ._weight import LowPrecision


# Rules of `implicit` for weights whose products round: these products, and operations
# that only move numbers, after which products still round.


@add_rule(
    "dot_general",
    of=LowPrecision,
    takes="dimension_numbers precision preferred_element_type",
    out_sharding=None,
)
def _dot_general(interpreter, eqn, values):
    dtype = eqn.outvars[0].aval.dtype
    numbers = eqn.params["dimension_numbers"]
    if not is_rounded(numbers, dtype):
        return NotImplemented
    first, second = values
    w_first = not isinstance(second, LowPrecision)
    x, w = (second, first) if w_first else (first, second)
    (x_contracted, w_contracted), (x_batch, w_batch) = numbers
    if w_first:
        x_contracted, w_contracted = w_contracted, x_contracted
        x_batch, w_batch = w_batch, x_batch
    x = interpreter.dequantize(x, eqn)
    numbers = (x_contracted, w_contracted), (x_batch, w_batch)
    packed = _packed(w, w_contracted, w_batch)
    y = rounded_dot(x, w.weight, numbers, w.roundings, dtype, packed, w.history)
    if w_first:
        number, rest = len(w_batch), x.ndim - len(x_contracted)
        order = [*range(number), *range(rest, y.ndim), *range(number, rest)]
        y = lax.transpose(y, order)
    return [y]


def _packed(w, contracted, batch):
    # Returns the weight rounded before, if it was rounded along the contracted axes.
    known = () if w.axis is None else [w.ndim + i for i in as_tuple(w.axis)]
    in_order = list(batch) == list(range(len(batch)))
    return w.rounded if in_order and list(contracted) == list(known) else None


@add_rule(
    "conv_general_dilated",
    of=LowPrecision,
    takes="dimension_numbers window_strides padding lhs_dilation rhs_dilation "
    "feature_group_count batch_group_count precision preferred_element_type",
    out_sharding=None,
)
def _conv(interpreter, eqn, values):
    x, w = values
    params = dict(eqn.params)
    dtype = eqn.outvars[0].aval.dtype
    del params["out_sharding"]
    if not jnp.issubdtype(dtype, jnp.floating):
        return NotImplemented
    roundings = (w if isinstance(w, LowPrecision) else x).roundings
    x, w = (interpreter.dequantize(v, eqn) for v in (x, w))
    conv = Convolution(params)
    return [rounded_conv(x.astype(dtype), w, conv, roundings)]


@add_rule("transpose", of=LowPrecision, takes="permutation")
def _transpose(interpreter, eqn, values):
    (w,) = values
    order = [int(i) for i in eqn.params["permutation"]]
    axis = w.axis
    if axis is not None:
        axes = tuple(order.index(w.ndim + i) - w.ndim for i in as_tuple(axis))
        axis = axes[0] if isinstance(axis, int) else axes
    return [w.moved(lax.transpose(w.weight, order), axis)]


@add_rule(
    *("copy", "name", "optimization_barrier", "pvary"),
    *("reshape", "squeeze", "broadcast_in_dim", "slice", "dynamic_slice", "rev"),
    *("split", "unstack", "stack", "concatenate", "neg", "sharding_constraint"),
    of=LowPrecision,
    passes_all=True,
)
def _move(interpreter, eqn, values):
    first, *rest = values
    low = [v for v in values if isinstance(v, LowPrecision)]
    # (The sliced operand comes before its indices.)
    together = ("stack", "concatenate", "optimization_barrier")
    if eqn.primitive.name in together and low != values:
        return NotImplemented
    if any(v.roundings != first.roundings for v in low):
        return NotImplemented
    arrays = [first.weight, *[interpreter.dequantize(v, eqn) for v in rest]]
    return [first.moved(y, None) for y in bind(eqn, arrays)]


@add_rule("mul", "div", of=LowPrecision, passes_all=True)
def _scale(interpreter, eqn, values):
    (a, b), (left, right) = values, eqn.invars
    w, other = (a, right) if isinstance(a, LowPrecision) else (b, left)
    if interpreter.constant(other) is None:
        return NotImplemented
    if eqn.primitive.name == "div" and w is b:
        return NotImplemented
    arrays = [interpreter.dequantize(v, eqn) for v in values]
    return [w.moved(bind(eqn, arrays)[0], w.axis)]


# In a matrix, this looks up rows, which are not a weight.
@add_rule("gather", of=LowPrecision, passes_all=True)
def _gather(interpreter, eqn, values):
    w, *rest = values
    if not isinstance(w, LowPrecision) or w.ndim < 3:
        return NotImplemented
    return [w.moved(bind(eqn, [w.weight, *rest])[0], None)]
