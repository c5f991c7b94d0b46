import collections
import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._array import identity
from ..formats import AbstractFormat
from ._decision import Decision
from ._rounding import check, contracted_axes


if TYPE_CHECKING:
    from .._solvers import AbstractMethod
    from .._trace import Gram, Statistics


def folded(
    decisions: Sequence[Decision],
    stats: "Statistics | None",
    method: "AbstractMethod | None",
) -> "tuple[Sequence[Decision], Statistics | None]":
    """If the method is `AWQ`, scales the channels of the weights to quantize, and
    divides an earlier factor of their inputs by the same scales. Returns the decisions
    with the new leaves, and the statistics of the new inputs."""
    if stats is None or method is None:
        return decisions, stats
    from .._solvers import AWQ

    check(stats, method)
    if not isinstance(method, AWQ):
        return decisions, stats
    decisions = [*decisions]
    infos = {d.info.path: d.info for d in decisions if d.info is not None}
    places = {d.info.path: i for i, d in enumerate(decisions) if d.info is not None}
    number = collections.Counter(identity(d.leaf) for d in decisions)
    done = 0

    def part(path, axes):
        decision = decisions[places[path]]
        return _Part(path, decision.leaf, axes, decision.format)

    for factors, weights in stats.folds:
        if not all(path in places for path, _ in (*factors, *weights)):
            continue
        scaled = [part(*each) for each in weights]
        before = [part(*each) for each in factors]
        formats = ((weight, weight.format) for weight in scaled)
        quantized = [w for w, f in formats if f is not None and method.applies(f)]
        ordinary = all(
            eqx.is_inexact_array(x.leaf) and number[identity(x.leaf)] == 1
            for x in (*scaled, *before)
        )
        along = all(x.axes == contracted_axes(infos[x.path]) for x in quantized)
        if not quantized or not ordinary or not along:
            continue
        gram = stats[scaled[0].path, scaled[0].axes]
        steps = _steps(gram, (*scaled, *before))
        if steps is None:
            continue
        scales = _best(method, quantized, gram, steps)
        for weight in scaled:
            _put(decisions, places, weight, weight.leaf * weight.along(scales))
        for factor in before:
            _put(decisions, places, factor, factor.leaf / factor.along(scales))
        stats = stats.scaled(weights, 1 / scales)
        done += 1
    if not done:
        warnings.warn(
            f"`method` {method} scales no weight: no array of the model is known to "
            f"scale the inputs of a weight alone. All are rounded by {method.then}.",
            stacklevel=4,
        )
    return decisions, stats


class _Part(NamedTuple):
    path: str
    leaf: Any
    axes: tuple[int, ...]
    format: AbstractFormat | None

    def along(self, scales: Float[Array, "*steps k"]) -> Float[Array, "..."]:
        """Returns the scales with the axes of the leaf, of size one where they
        repeat."""
        steps = range(scales.ndim - 1)
        shape = enumerate(self.leaf.shape)
        sizes = [n if i in steps or i in self.axes else 1 for i, n in shape]
        return scales.reshape(sizes).astype(self.leaf.dtype)


def _put(decisions, places, part, leaf):
    i = places[part.path]
    decisions[i] = dataclasses.replace(decisions[i], leaf=leaf.astype(part.leaf.dtype))


def _steps(gram: "Gram", parts: Sequence[_Part]) -> tuple[int, ...] | None:
    # The leading axes along which each index has its own inputs and scales. `None` if
    # not all weights have these axes, or if the statistics have other sizes.
    lead, k = gram.rows.shape, gram.value.shape[-1]
    number = max((i + 1 for i, n in enumerate(lead) if n > 1), default=0)
    for part in parts:
        shape = part.leaf.shape
        if shape[:number] != lead[:number] or min(part.axes) < number:
            return None
        if max(part.axes) >= len(shape) or math.prod(shape[i] for i in part.axes) != k:
            return None
    return lead[:number]


def _best(method, weights, gram, steps):
    from .._solvers import ScaleSearch, solved, squared_errors

    # (Methods such as `GPTQ` are too slow for a trial with each candidate.)
    search = method.then if isinstance(method.then, ScaleSearch) else ScaleSearch()
    candidates = method.candidates(gram.diagonal.reshape(*steps, -1))
    best, least = candidates[0], jnp.full(steps, jnp.inf)
    for scales in candidates:
        diagonal = gram.scaled(1 / scales).diagonal
        loss = jnp.zeros(steps)
        for weight in weights:
            s = weight.along(scales).astype(jnp.float32)
            w = weight.leaf.astype(jnp.float32) * s
            axes = tuple(i - w.ndim for i in weight.axes)
            q = solved(w, weight.format, search, diagonal, gram.rows, axis=axes)
            error = (w - q.dequantize()) / s
            loss += squared_errors(error, gram.value, axes).reshape(steps)
        best = jnp.where((loss < least)[..., None], scales, best)
        least = jnp.minimum(loss, least)
    return best
