import equinox as eqx
import jax
import jax.numpy as jnp

from ..._array import is_quantized, muted, quantize
from ..._implicit import add_rule, bind, moves, rules_of
from ..._product import as_tuple
from ._fake_quantized import FakeQuantized


# Rules of `implicit` for fake-quantized weights. Any primitive takes the rounded weight
# as an ordinary array; but products also round their inputs, if there is a format for
# these. They do so in the same places as with the packed weight, also after moves under
# which the packed weight stays packed.


@add_rule("dot_general", "ragged_dot_general", of=FakeQuantized, passes_all=True)
def _product(interpreter, eqn, values):
    # (Of two weights, the larger one if possible, as for packed ones.)
    first, second, *_ = values
    both = [i for i in (1, 0) if isinstance(values[i], FakeQuantized)]
    if len(both) == 2 and first.size > second.size:
        both = [0, 1]
    for place in both:
        w, x = values[place], values[1 - place]
        if w.activation is None:
            continue
        others = [x if x is w else _dense(x) for x in values]
        if _as_packed(interpreter, eqn, others) is None:
            continue
        x = jnp.asarray(_dense(x))
        new = [_dense(value) for value in values]
        new[1 - place] = _rounded_input(x, w, *_contracted(eqn, place))
        return bind(eqn, new)
    return NotImplemented


@add_rule(*moves, "mul", "div", "neg", of=FakeQuantized, passes_all=True)
def _move(interpreter, eqn, values):
    weights = [w for w in values if isinstance(w, FakeQuantized)]
    if all(w.activation is None for w in weights):
        return NotImplemented
    packed = _as_packed(interpreter, eqn, values)
    if packed is None:
        return NotImplemented
    results = bind(eqn, [_dense(value) for value in values])
    of = lambda q: next(w for w in weights if w.activation == q.activation)
    return [
        of(q).rounded(y, q.axis) if is_quantized(q) and q.activation else y
        for q, y in zip(packed, results, strict=True)
    ]


def _as_packed(interpreter, eqn, values):
    """Returns the results of a rule for packed weights, as skeletons. `None` if no rule
    applies, so that packed weights would be dequantized."""
    skeletons = [_skeleton(x) if isinstance(x, FakeQuantized) else x for x in values]
    applies = True

    def apply(values):
        nonlocal applies
        for rule in rules_of(eqn, values):
            results = rule(interpreter, eqn, values)
            if results is not NotImplemented:
                return results
        applies = False
        return []

    with muted():
        found = eqx.filter_eval_shape(apply, skeletons)
    return found if applies else None


def _skeleton(w):
    struct = jax.ShapeDtypeStruct(w.shape, w.dtype)
    return eqx.filter_eval_shape(
        quantize, struct, w.format, axis=w.axis, activation=w.activation
    )


def _contracted(eqn, place):
    # Returns the contracted axes of the inputs and of the weight.
    numbers = eqn.params.get("dimension_numbers")
    if numbers is None:
        numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    contracted, _ = numbers
    return contracted[1 - place], contracted[place]


def _rounded_input(x, w, x_contracted, w_contracted):
    # Rounds in rows that the packed product contracts at a time: the axes with blocks,
    # or those without.
    blocked = [w.ndim + i for i in as_tuple(w.axis)]
    along = blocked if blocked[0] in w_contracted else sorted(w_contracted)
    places = dict(zip(w_contracted, x_contracted, strict=True))
    axes = [places[i] for i in along]
    last = range(x.ndim - len(axes), x.ndim)
    rows = jnp.moveaxis(x, axes, last)
    rounded = w.rounded_input(
        rows.reshape(*rows.shape[: last.start], -1), blocked[0] in w_contracted
    )
    return jnp.moveaxis(rounded.reshape(rows.shape), last, axes)


def _dense(x):
    return x.dequantize() if isinstance(x, FakeQuantized) else x
