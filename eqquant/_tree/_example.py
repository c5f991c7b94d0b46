from collections.abc import Callable, Sequence
from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import identity, is_quantized
from ._decision import Decision
from ._jitted import closed
from ._on_call import methods_of, put_on_call, rebuilt
from ._owners import LeafInfo


if TYPE_CHECKING:
    from .._trace import Use


class Example:
    """A call of a model, as given for `example`: arguments, or a function and its
    further arguments."""

    def __init__(self, example: Any):
        pair = isinstance(example, tuple) and len(example) == 2
        if pair and callable(example[0]) and isinstance(example[1], tuple):
            fn, args = example
        else:
            fn, args = _call, example if isinstance(example, tuple) else (example,)
        self.fn: Callable[..., Any] = fn
        self.args: tuple[Any, ...] = args

    def uses(self, model: PyTree, leaves: Sequence[Any]) -> "list[Use | None]":
        """Returns how the call uses each leaf; `None` for a leaf that is not an array.
        An array in several places has the uses of all of them."""
        # (Imported here, so that `import eqquant` is quick.)
        from .._trace import is_array, Use, uses

        found = iter(uses(self.run, (model, *self.args)))
        each, joint = [], {}
        for leaf in leaves:
            arrays = [next(found) for x in jtu.tree_leaves(leaf) if is_array(x)]
            use = arrays[0] if is_array(leaf) else None
            each.append(use)
            if use is not None:
                before = joint.get(identity(leaf), Use((), ()))
                joint[identity(leaf)] = Use(
                    before.products + use.products,
                    before.others + use.others,
                    before.changed + use.changed,
                )
        return [
            None if use is None else joint[identity(leaf)]
            for leaf, use in zip(leaves, each)
        ]

    def run(self, model: PyTree, *args: Any) -> Any:
        return self.fn(closed(model), *args)

    def error(self, model: PyTree) -> Exception | None:
        """Traces the call of a model, and returns the error that it raises, if any."""
        # No function declares whether it takes a quantized array, so this tries it.
        try:
            eqx.filter_eval_shape(self.run, model, *self.args)
        except Exception as e:
            return e
        return None


def _call(model, *args):
    return model(*args)


def modules_on_call(
    model: PyTree,
    decisions: Sequence[Decision],
    new: Sequence[Any],
    example: Example | None,
    is_leaf: Callable[[Any], bool] = is_quantized,
) -> dict[int, bool]:
    """Returns the modules that have to run through [`eqquant.implicit`][], so that a
    model runs with new leaves. It maps their `id` to whether every method has to, or
    only the call. These are the modules of the decisions; with an `example`, the
    smallest modules that suffice.

    **Arguments:**

    - `decisions`: the decision on each leaf of `model`.
    - `new`, `is_leaf`: as in `smallest_on_call`.
    - `example`: a call of the model, if given.

    **Raises:**

    A `ValueError` for a weight that the call cannot take, whichever module runs so.
    """
    given = {id(module): False for d in decisions for module in d.on_call}
    if example is None:
        return given
    found = [(d.leaf, d.info) for d in decisions]
    return smallest_on_call(model, found, new, given, example, is_leaf)


def smallest_on_call(
    model: PyTree,
    found: Sequence[tuple[Any, LeafInfo | None]],
    new: Sequence[Any],
    given: dict[int, bool],
    example: Example,
    is_leaf: Callable[[Any], bool],
    goal: str = "quantized",
) -> dict[int, bool]:
    """Returns the smallest modules that have to run through `implicit` so that the call
    of a model takes new leaves.

    **Arguments:**

    - `found`: the leaves of `model`, each with its description.
    - `new`: the replacement of each leaf, or its skeleton.
    - `given`: modules that run so in any case.
    - `example`: a call of the model.
    - `is_leaf`: which nodes of `model` are leaves.
    - `goal`: what weights should become, for messages.
    """
    pairs = [*zip(found, new, strict=True)]
    infos = {
        i: info
        for i, ((leaf, info), x) in enumerate(pairs)
        if info is not None and x is not leaf
    }

    def error(numbers, callers):
        leaves = [x if i in numbers else leaf for i, ((leaf, _), x) in enumerate(pairs)]
        return example.error(rebuilt(model, leaves, put_on_call(callers), is_leaf))

    if error(infos, given) is None:
        return given
    callers = dict(given)
    for numbers in _alike(infos):
        why = error(numbers, callers)
        if why is None:
            continue
        for more in _around(infos, numbers):
            if error(numbers, callers | more) is None:
                callers |= more
                break
        else:
            # Among weights that are alike, name the first that fails alone.
            alone = ((i, error((i,), callers)) for i in numbers)
            first, why = next((x for x in alone if x[1]), (numbers[0], why))
            raise _cannot(infos[first], why, goal, example.fn) from why
    why = error(infos, callers)
    if why is not None:
        raise ValueError(
            f"The call of this `example` takes each of these weights {goal}, but not "
            f"all of them at once: {[info.path for info in infos.values()]}. "
            f"Exclude some by rules. The call raised: {why}"
        ) from why
    return callers


def _alike(infos):
    # Weights that are alike, such as in the layers of a stack, are tried at once.
    groups = {}
    for i, info in infos.items():
        key = tuple(map(type, info.ancestors)), info.path.split(".")[-1]
        groups.setdefault(key, []).append(i)
    return groups.values()


def _around(infos, numbers):
    # The modules around weights that are alike, the innermost first.
    around = [infos[i].ancestors for i in numbers]
    for every_method in (False, True):
        for depth in reversed(range(len(around[0]))):
            first, *rest = [each[depth] for each in around]
            if methods_of(type(first)) if every_method else callable(first):
                yield dict.fromkeys(map(id, (first, *rest)), every_method)


def _cannot(info, why, goal, fn):
    name = f"`{getattr(fn, '__qualname__', type(fn).__name__)}`"
    where = " outside of the methods of the modules around it"
    return ValueError(
        f"`{info.path}` cannot be {goal} for this `example`: "
        f"{'the call' if fn is _call else name} passes it to functions that take "
        f"ordinary arrays only{where if info.ancestors else ''}. Exclude it by a rule; "
        "or run the function as by `eqquant.implicit`, here and wherever you call it: "
        "pass `example=(eqquant.implicit(fn), args)`. The call raised, perhaps of an "
        f"array inside of it: {why}"
    )


def contracted(
    use: "Use", shape: tuple[int, ...], known: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Returns the axes of a leaf that its products with inputs contract; `None` if it
    enters no such product.

    **Arguments:**

    - `use`: how the call uses it. The model is the first argument.
    - `shape`: its shape.
    - `known`: the axes that its class is registered to contract, if any.
    """
    found = [p for p in (*use.products, *use.changed) if p.is_by_inputs]
    if not found:
        return None
    first = next((p for p in found if p.whole), found[0])
    axes = tuple(sorted(i - len(shape) for i in first.contracted))
    # Whether an axis of size one is contracted makes no difference.
    long = lambda axes: {i for i in axes if shape[i] != 1}
    return known if known is not None and long(axes) == long(known) else axes
