from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive


# `(interpreter, equation, values) -> results`, or `NotImplemented`.
Rule = Callable[[Any, JaxprEqn, list], Any]

_rules: dict[Primitive | str, list[Rule]] = {}


def register_rule(primitive: Primitive | str) -> Callable[[Callable], Callable]:
    """Says how a primitive is applied to quantized arrays by [`eqquant.implicit`][].
    Used as a decorator of a function from the operands, and the parameters of the
    primitive as keywords, to the result.

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

    A decorator, which returns the function as it is. The function is called where one
    of the operands is a [`eqquant.QuantizedArray`][]; the others are JAX arrays, NumPy
    arrays or scalars. It should return what the primitive would for the dequantized
    operands, as an array or as a `QuantizedArray`; a list, if the primitive has several
    results. Or else `NotImplemented`: then the rule that was registered before is
    tried, and when there is none left, the operands are dequantized.

    **Raises:**

    A `TypeError` if `primitive` is neither.
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
        # Programs that were compiled before may now be others.
        jax.clear_caches()
        return fn

    return register


def add_rule(*primitives: Primitive | str) -> Callable[[Rule], Rule]:
    """For the rules of the package: they see the equation, and the interpreter."""

    def add(rule):
        for primitive in primitives:
            _rules.setdefault(primitive, []).insert(0, rule)
        return rule

    return add


def rules_of(primitive: Primitive) -> list[Rule]:
    """The rules of a primitive, in the order that they are tried in."""
    return [*_rules.get(primitive, ()), *_rules.get(primitive.name, ())]
