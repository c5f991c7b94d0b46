import jax.numpy as jnp

from .._array import is_quantized
from .._ops import conv, dot, precision_name, ragged_dot
from ._table import add_rule


# Rules for products, which read the packed codes. (Other operands may be NumPy arrays.)


@add_rule(
    "dot_general",
    takes="dimension_numbers precision preferred_element_type",
    out_sharding=None,
)
def _dot_general(interpreter, eqn, values):
    # If both operands are quantized, keep the larger one packed if possible.
    first, second = values
    both = is_quantized(first) and is_quantized(second)
    orders = [True, False] if both and first.size > second.size else [False, True]
    for q_first in orders:
        x, q = (second, first) if q_first else (first, second)
        if not is_quantized(q):
            continue
        contracted, batch = eqn.params["dimension_numbers"]
        if q_first:
            contracted, batch = contracted[::-1], batch[::-1]
        y = dot(
            jnp.asarray(interpreter.dequantize(x, eqn)),
            q,
            (contracted, batch),
            out_dtype=eqn.outvars[0].aval.dtype,
            precision=precision_name(eqn.params["precision"]),
            q_first=q_first,
        )
        if y is not None:
            return [y]
    return NotImplemented


@add_rule(
    "conv_general_dilated",
    takes="dimension_numbers window_strides padding lhs_dilation rhs_dilation "
    "feature_group_count batch_group_count precision preferred_element_type",
    out_sharding=None,
)
def _conv(interpreter, eqn, values):
    x, q = values
    params = dict(eqn.params)
    del params["out_sharding"]
    if not is_quantized(q):
        return NotImplemented
    y = conv(jnp.asarray(interpreter.dequantize(x, eqn)), q, **params)
    if y is None:
        return NotImplemented
    return [y]


@add_rule(
    "ragged_dot_general",
    takes="ragged_dot_dimension_numbers precision preferred_element_type",
    group_offset=None,
    out_sharding=None,
)
def _ragged_dot(interpreter, eqn, values):
    x, q, group_sizes = values
    group_sizes = jnp.asarray(group_sizes)  # may be a NumPy array
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (x_axes, q_axes), (batch, _) = numbers.dot_dimension_numbers
    if not is_quantized(q) or len(x_axes) != 1:
        return NotImplemented
    (x_axis,), (q_axis,) = x_axes, q_axes
    plain = (
        x.ndim == 2
        and group_sizes.ndim == 1
        and len(batch) == 0
        and tuple(numbers.lhs_ragged_dimensions) == (1 - x_axis,)
        and tuple(numbers.rhs_group_dimensions) == (0,)
        and q_axis in (1, 2)
    )
    if not plain:
        return NotImplemented
    x = jnp.asarray(interpreter.dequantize(x, eqn))
    dtype = eqn.outvars[0].aval.dtype
    y = ragged_dot(
        x if x_axis == 1 else x.T,
        q,
        group_sizes,
        transposed=q_axis == 2,
        dtype=dtype,
        precision=precision_name(eqn.params["precision"]),
    )
    if y is None:
        return NotImplemented
    return [y]
