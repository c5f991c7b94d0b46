from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive

from .._array import AbstractArrayLike, QuantizedArray


# `(interpreter, equation, values) -> results`, or `NotImplemented`.
Rule = Callable[[Any, JaxprEqn, list], Any]

# Each with the class of the operands that it is for.
_rules: dict[Primitive | str, list[tuple[Rule, type]]] = {}

# The classes that variables of a jaxpr may have, besides arrays.
_operands: set[type] = {QuantizedArray}


def is_operand(x: Any) -> bool:
    """Whether the interpreter has rules for a value, which is no ordinary array."""
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
    has several results). It may return `NotImplemented`: then the rule that was
    registered before it is tried, and after the last one the operands are dequantized.

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

        add_rule(primitive)(rule)
        # Programs compiled before this may contain other choices.
        jax.clear_caches()
        return fn

    return register


def add_rule(
    *primitives: Primitive | str, of: type = QuantizedArray
) -> Callable[[Rule], Rule]:
    """Registers a rule of the package, which takes the interpreter, the equation and
    the operands. It is for operands of the class `of`, a subclass of
    `AbstractArrayLike`; with `AbstractArrayLike` itself, for all."""
    if of is not AbstractArrayLike:
        _operands.add(of)

    def add(rule):
        for primitive in primitives:
            _rules.setdefault(primitive, []).insert(0, (rule, of))
        return rule

    return add


def rules_of(primitive: Primitive, values: Sequence[Any] = ()) -> list[Rule]:
    """The rules of a primitive for these operands, in the order in which they are
    tried."""
    rules = [*_rules.get(primitive, ()), *_rules.get(primitive.name, ())]
    operands = [value for value in values if is_operand(value)]
    return [rule for rule, of in rules if all(isinstance(x, of) for x in operands)]
