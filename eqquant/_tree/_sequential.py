import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._array import identity, QuantizedArray
from .._product import Axis
from .._progress import Watched
from ..formats import AbstractFormat
from ._decision import Decision
from ._rounding import (
    check_method,
    contracted_axes,
    not_along,
    otherwise,
    refused_formats,
    Rounding,
    warn,
)


if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from .._solvers import AbstractMethod
    from .._trace import Sequential


def is_sequential(stats: Any) -> "TypeIs[Sequential]":
    """Whether these are statistics that are taken while a model is quantized."""
    from .._trace import Sequential

    return isinstance(stats, Sequential)


def rounding_in_sequence(
    model: PyTree,
    decisions: Sequence[Decision],
    sequential: "Sequential",
    method: "AbstractMethod | None",
) -> Rounding:
    """Returns the same as `rounding`, with statistics that are taken while the model is
    quantized: each weight is rounded after the weights that the model uses before it.
    Raises a `ValueError` if the function of `sequential` does not use the model, or
    contracts a weight along other axes than it is quantized along."""
    from .._solvers import AWQ, GPTQ, solved
    from .._trace import InSequence, is_along

    check_method(method)
    if isinstance(method, AWQ):
        raise ValueError(
            "`AWQ` scales weights before any is quantized: pass it statistics of "
            f"`eqquant.calibrate`, or pass {method.then} with `Sequential`."
        )
    method = GPTQ() if method is None else method
    refused = refused_formats(decisions, method, 6)
    todo = _weights(decisions)
    run = InSequence(sequential, model, todo)
    owner, places = {}, {}
    for path, weight in todo.items():
        key = identity(weight.leaf)
        places.setdefault(key, []).append(path)
        if path in run.contracted:
            # (An array in two places has the inputs of the first.)
            owner.setdefault(key, path)
    for path in owner.values():
        axes, known = todo[path].axes, run.contracted[path]
        shape = todo[path].leaf.shape
        if not any(is_along(each, axes, shape) for each in known):
            raise not_along(path, axes, known, shape)
    found, few = {}, set()
    bar = Watched(run.groups, "Quantizing", lambda group: group.name)
    for path, why in run.again[:1]:
        more = f" and {len(run.again) - 1} more" if len(run.again) > 1 else ""
        bar.say(f"For `{path}`{more}, parts of `fn` are run again: {why}.")
    for group in bar:
        weights = {
            path: todo[path]
            for path, axes in group.weights
            if owner[identity(todo[path].leaf)] == path
            and is_along(axes, todo[path].axes, todo[path].leaf.shape)
        }
        if not weights:
            continue
        gram, cross = run.measure(group, bar.note)
        if np.min(gram.rows) < gram.value.shape[-1]:
            few.update(weights)
        for path, weight in weights.items():
            key = identity(weight.leaf)
            part = weight.leaf[group.index]
            own, both = (g.along(weight.axes, part.shape) for g in (gram, cross))
            q = solved(
                part,
                weight.format,
                None if weight.format in refused else method,
                own.value,
                own.rows,
                cross=both.value,
                mix=sequential.mix,
                axis=weight.axis,
            )
            found.setdefault(key, {})[group.steps] = q
            for place in places[key]:
                run.put(place, group, q.dequantize())
    unknown = [paths[0] for key, paths in places.items() if key not in found]
    warn([path for path in todo if path in few], unknown, otherwise(method), 5)
    done = {key: _joined(parts) for key, parts in found.items()}
    return Rounding(method, refused, done=done)


class _Weight(NamedTuple):
    leaf: Any
    format: AbstractFormat
    axis: Axis
    axes: tuple[int, ...]


def _weights(decisions: Sequence[Decision]) -> dict[str, _Weight]:
    # (A skeleton has no numbers to round.)
    return {
        d.info.path: _Weight(d.leaf, d.format, d.info.axis, contracted_axes(d.info))
        for d in decisions
        if d.info is not None
        and d.format is not None
        and not isinstance(d.leaf, jax.ShapeDtypeStruct)
    }


def _joined(parts: dict[tuple[int, ...], QuantizedArray]) -> QuantizedArray:
    # Each part has leading axes of size one, for its steps.
    steps = sorted(parts)
    sizes = [i + 1 for i in steps[-1]]
    each = [dataclasses.replace(parts[i], sharding=None) for i in steps]

    def join(*arrays):
        shape = arrays[0].shape[len(sizes) :]
        return jnp.stack(arrays).reshape(*sizes, *shape)

    return jtu.tree_map(join, *each) if sizes else each[0]
