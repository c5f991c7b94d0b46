import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax.export
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._array import name_of, source_of
from .._implicit import opened, sizes_of_scan
from .._product import problem_of, qmatmul_p
from .._trace import propagate
from ..kernels import choose, platforms, Problem


# The paths of the quantized arrays that a value is computed from.
Paths: TypeAlias = frozenset[str]


# The path of arrays that a function closes over.
closed_over = "closed over"


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a quantized operand by a program.

    - `paths`: the path of the operand, or several paths, if it was computed from
        several arrays.
    - `kind`: `"product"` if a product reads the packed codes, `"rows"` if some rows are
        decoded, and `"dequantize"` if the dense array is made.
    - `how`: the kernel of a product. Where `implicit` dequantizes an array, the name of
        the primitive that needs it.
    - `problem`: the description of a product by a kernel.
    - `nbytes`: the number of decoded bytes, which is 0 for products.
    - `times`: the number of times, for uses in a loop.
    - `source`: the file and the line in the user's code.
    """

    paths: tuple[str, ...]
    kind: Literal["product", "rows", "dequantize"]
    how: str
    problem: Problem | None
    nbytes: int
    times: int
    source: str


def uses(
    jaxpr: Jaxpr | ClosedJaxpr,
    labels: Sequence[Paths],
    constants: Mapping[int, Paths] | None = None,
) -> list[Use]:
    """Lists the uses of quantized operands in a program, in order.

    - `labels`: for each of its operands, the paths of the quantized arrays that store
        it.
    - `constants`: the same for its constants, by the `id` of each array.
    """
    found = []
    _Walk(constants or {}, found).walk(jaxpr, labels, 1)
    return found


_none: Paths = frozenset()


@dataclasses.dataclass(frozen=True)
class _Walk:
    # Propagates the paths through a program, and collects the uses.
    constants: Mapping[int, Paths]
    found: list[Use]

    def walk(self, jaxpr, labels, times) -> list[Paths]:
        """Returns the paths of the results."""

        def rule(eqn, inputs):
            use = _use(eqn, inputs, times)
            if use is None:
                return self._inside(eqn, inputs, times)
            self.found.append(use)
            return [_none] * len(eqn.outvars)

        constant = lambda a: self.constants.get(id(a), _none)
        results, _ = propagate(jaxpr, labels, rule, lambda _: _none, constant)
        return results

    def _inside(self, eqn, inputs, times):
        params = eqn.params
        if eqn.primitive.name == "scan":
            consts, number = sizes_of_scan(eqn)
            carry = slice(consts, consts + number)
            step = lambda walk, inputs: walk.walk(
                params["jaxpr"], inputs, times * params["length"]
            )
            return self._until_same(step, inputs, carry)
        if eqn.primitive.name == "while":
            first = params["cond_nconsts"]
            second = first + params["body_nconsts"]

            def step(walk, inputs):
                of_cond = inputs[:first] + inputs[second:]
                walk.walk(params["cond_jaxpr"], of_cond, times)
                return walk.walk(params["body_jaxpr"], inputs[first:], times)

            return self._until_same(step, inputs, slice(second, None))
        if eqn.primitive.name == "cond":
            branches = [self.walk(b, inputs[1:], times) for b in params["branches"]]
            return [_union(each) for each in zip(*branches)]
        outputs = [_union(inputs)] * len(eqn.outvars)
        for jaxpr in _jaxprs(eqn):
            number = len(opened(jaxpr)[0].invars)
            same = number == len(inputs)
            given = inputs if same else [_union(inputs)] * number
            results = self.walk(jaxpr, given, times)
            if same and len(results) == len(outputs):
                outputs = results
        return outputs

    def _until_same(self, step, inputs, carry):
        # The body of a loop may move a value to another part of the carry, so iterate
        # until the paths no longer change.
        while True:
            walk = _Walk(self.constants, [])
            outputs = step(walk, inputs)
            before = inputs[carry]
            after = [a | b for a, b in zip(before, outputs)]
            if after == before:
                self.found.extend(walk.found)
                return outputs
            inputs = [*inputs]
            inputs[carry] = after


def _union(paths: Iterable[Paths]) -> Paths:
    return frozenset().union(*paths)


def _use(eqn, inputs, times) -> Use | None:
    name = name_of(eqn)
    if eqn.primitive is qmatmul_p:
        problem = problem_in(eqn)
        kernel = choose(problem, eqn.params["kernel"]).kernel.name
        # The first operand is `x`.
        return _made(eqn, inputs[1:], "product", kernel, problem, 0, times)
    if name is None:
        return None
    if not name.startswith(("dequantize", "decode_rows")):
        # Here, too, the first operand is `x`.
        return _made(eqn, inputs[1:], "product", name, None, 0, times)
    nbytes = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in eqn.outvars)
    kind = "rows" if name == "decode_rows" else "dequantize"
    reason = name.removeprefix("decode_rows").removeprefix("dequantize")
    reason = reason.removeprefix("_for_")
    return _made(eqn, inputs, kind, reason, None, nbytes, times)


def _made(eqn, inputs, kind, how, problem, nbytes, times):
    paths = tuple(sorted(_union(inputs))) or (closed_over,)
    return Use(paths, kind, how, problem, nbytes, times, source_of(eqn))


def problem_in(eqn: JaxprEqn) -> Problem:
    """Returns the description of a product by the primitive, on the default backend."""
    platform = jax.export.default_export_platform()
    platform = platform if platform in platforms else "other"
    return problem_of(*[v.aval for v in eqn.invars], platform=platform, **eqn.params)


def _jaxprs(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    leaves = jtu.tree_leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
    return [leaf for leaf in leaves if _is_jaxpr(leaf)]


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)
