from collections.abc import Sequence
from typing import Any

from ._on_call import methods_of, put_on_call, rebuilt
from ._owners import LeafInfo
from ._request import Request


def smallest_on_call(
    request: Request,
    found: Sequence[tuple[Any, LeafInfo | None]],
    new: Sequence[Any],
    given: dict[int, bool],
) -> dict[int, bool]:
    """Returns the smallest modules that have to run through [`eqquant.implicit`][] so
    that the call of a request takes new leaves. It maps their `id` to whether every
    method has to, or only the call. Raises a `ValueError` for a weight that the call
    cannot take, whichever module runs so.

    - `found`: the leaves of the model, each with its description.
    - `new`: the replacement of each leaf, or its skeleton.
    - `given`: modules that run so in any case.
    """
    call, goal = request.call, request.goal
    assert call is not None
    pairs = [*zip(found, new, strict=True)]
    infos = {
        i: info
        for i, ((leaf, info), x) in enumerate(pairs)
        if info is not None and x is not leaf
    }

    def error(numbers, callers):
        leaves = [x if i in numbers else leaf for i, ((leaf, _), x) in enumerate(pairs)]
        change = put_on_call(callers)
        return call.error(rebuilt(request.model, leaves, change, request.is_leaf))

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
            raise _cannot(infos[first], why, goal, call) from why
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


def _cannot(info, why, goal, call):
    where = " outside of the methods of the modules around it" if info.ancestors else ""
    return ValueError(
        f"`{info.path}` cannot be {goal} for this `example`: {call.name} passes it to "
        f"functions that take ordinary arrays only{where}. Exclude it by a rule; or "
        "run the function as by `eqquant.implicit`, here and wherever you call it: "
        "pass `example=(eqquant.implicit(fn), args)`. The call raised, perhaps of an "
        f"array inside of it: {why}"
    )
