from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Primitive

from .._array import AbstractArrayLike, QuantizedArray


# `(interpreter, equation, values) -> results`, or `NotImplemented`.
Rule = Callable[[Any, JaxprEqn, list], Any]


class _Entry(NamedTuple):
    # A rule, the class of its operands, and the parameters that it heeds. `None` for
    # any parameters.
    rule: Rule
    of: type
    parameters: Mapping[str, Any] | None


_rules: dict[Primitive | str, list[_Entry]] = {}

# The classes that variables of a jaxpr may have, besides arrays.
_operands: set[type] = {QuantizedArray}


def is_operand(x: Any) -> bool:
    """Whether the interpreter has rules for the class of a value."""
    return type(x) in _operands


def register_rule(primitive: Primitive | str) -> Callable[[Callable], Callable]:
    """Registers a rule by which [`eqquant.implicit`][] applies a primitive to quantized
    arrays. Used as a decorator of a function that takes the operands, and the
    parameters of the primitive as keywords, and returns the result.

    !!! Example

        ```python
        @eqquant.register_rule("rev")
        def reverse(w, *, dimensions):
            if w.axis == -1 and dimensions == (0,):
                return w[::-1]
            return NotImplemented
        ```

    **Arguments:**

    - `primitive`: a JAX primitive, or the name of one: `"dot_general"`. Names may
        differ between versions of JAX.

    **Returns:**

    A decorator, which returns the function unchanged. The function is called if at
    least one operand is a [`eqquant.QuantizedArray`][]; the others are JAX arrays,
    NumPy arrays or scalars. It should return the result of the primitive for the
    dequantized operands, as an array or a `QuantizedArray` (a list, if the primitive
    has several results). It may return `NotImplemented`: then the rules that were
    registered before it are tried, and finally the operands are dequantized.

    **Raises:**

    A `TypeError` if `primitive` is neither a primitive nor a string.
    """
    if not isinstance(primitive, Primitive | str):
        raise TypeError(
            "`primitive` should be a `jax.extend.core.Primitive` or the name of one. "
            f"Got {primitive!r}."
        )

    def register(fn):
        def rule(interpreter, eqn, values):
            del interpreter
            out = fn(*values, **eqn.params)
            several = out is NotImplemented or eqn.primitive.multiple_results
            return out if several else [out]

        add_rule(primitive, passes_all=True)(rule)
        # Programs compiled before this may contain other choices.
        jax.clear_caches()
        return fn

    return register


def add_rule(
    *primitives: Primitive | str,
    of: type = QuantizedArray,
    passes_all: bool = False,
    takes: str = "",
    **parameters: Any,
) -> Callable[[Rule], Rule]:
    """Registers a rule of the package, which takes the interpreter, the equation and
    the operands.

    - `of`: the class of its operands, a subclass of `AbstractArrayLike`; or
        `AbstractArrayLike` itself, for all of them.
    - `passes_all`: whether it applies to any parameters, because it binds the primitive
        with all of them.
    - `takes`: the names of the parameters that it takes, whatever their values.
    - `parameters`: other parameters, each with the only value to which it applies. It
        does not apply to equations with further parameters, such as a newer JAX may
        have.
    """
    if of is not AbstractArrayLike:
        _operands.add(of)

    def add(rule):
        known = None if passes_all else any_of(takes) | parameters
        entry = _Entry(rule, of, known)
        for primitive in primitives:
            _rules.setdefault(primitive, []).insert(0, entry)
        return rule

    return add


def rules_of(eqn: JaxprEqn, values: Sequence[Any] = ()) -> list[Rule]:
    """Returns the rules that apply to an equation and its operands, in the order in
    which to try them."""
    primitive = eqn.primitive
    entries = [*_rules.get(primitive, ()), *_rules.get(primitive.name, ())]
    operands = [value for value in values if is_operand(value)]
    return [
        rule
        for rule, of, parameters in entries
        if all(isinstance(x, of) for x in operands)
        and (parameters is None or heeds(parameters, eqn))
    ]


def any_of(names: str) -> dict[str, Any]:
    """Returns parameters that may have any value, for `heeds`. Their names are
    separated by spaces."""
    return dict.fromkeys(names.split(), ...)


def heeds(parameters: Mapping[str, Any], eqn: JaxprEqn) -> bool:
    """Whether an equation has only these parameters, with these values. (`...` means
    any value.)"""
    for name, value in eqn.params.items():
        wanted = parameters.get(name, _unknown)
        if wanted is not ... and not (value is wanted or _equal(value, wanted)):
            return False
    return True


_unknown = object()


def _equal(a, b):
    # (Not for arrays, which compare elementwise.)
    return type(a) is type(b) and isinstance(a, int | str | tuple) and a == b
