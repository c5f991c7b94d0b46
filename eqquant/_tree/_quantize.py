import dataclasses
import difflib
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any, get_args, Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._array import AbstractStandIn, is_quantized, quantize, QuantizedArray
from .._product import Axis, full_spec, normalise_axis
from ..formats import AbstractFormat, as_format, NF4
from ._jitted import closed, opened
from ._on_call import is_on_call, not_on_call, on_call, rebuilt
from ._owners import (
    calls_as_equinox,
    calls_as_registered,
    convolutions,
    LeafInfo,
    leaves_with_info,
    norms,
    reparametrisations,
)
from ._rules import Rules


FilterSpec: TypeAlias = AbstractFormat | str | Rules | PyTree


class _Wish(NamedTuple):
    """What the user said of a leaf: a format or not, and whether of this leaf alone."""

    format: AbstractFormat | None
    named: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What becomes of a leaf: the format that it is to be quantized in, and the modules
    that then are to run as by `implicit`, if any. Or else why it is left as it is, and
    what would change that."""

    leaf: Any
    info: LeafInfo | None
    format: AbstractFormat | None
    reason: str = ""
    way_out: str = ""
    on_call: tuple[eqx.Module, ...] = ()

    @property
    def is_unknown(self) -> bool:
        """Whether it is left for want of knowing what its module does with it."""
        return self.reason.endswith(_unknown)


Unsupported: TypeAlias = Literal["skip", "on_call", "error"]


def tree_quantize(
    model: PyTree,
    filter_spec: FilterSpec = True,
    format: AbstractFormat | str = NF4(),
    *,
    axis: Axis | Literal["auto"] = "auto",
    min_size: int = 1024,
    embeddings: bool = False,
    unsupported: Unsupported = "skip",
    strict: bool = True,
) -> PyTree:
    """Quantizes the weights of a model. What comes back is the same model, of the same
    modules, to be used in the same way.

    !!! Example

        ```python
        model = eqx.nn.MLP(784, 10, 512, depth=2, key=key)
        model = eqquant.tree_quantize(model)
        jax.vmap(model)(x)
        ```

    **Arguments:**

    - `model`: any PyTree. Of `jax.ShapeDtypeStruct`s, as `eqx.filter_eval_shape` makes
        it, it becomes one of quantized arrays of such. What `eqx.filter_jit` was given
        is quantized inside of it.
    - `filter_spec`: what to quantize. One of

        - nothing: every weight of a matrix product that is known of. Those of the
            layers of `eqx.nn` and of what [`eqquant.register_owner`][] registered; and
            arrays that are in no module, only in plain dictionaries, lists and tuples.
        - a format, or its name: the same, in this format.
        - a PyTree that is a prefix of `model`, as of `eqx.partition`, whose leaves are
            formats, names of formats, booleans (`True` for `format`), `None`, or
            functions from a leaf to one of those.
        - [`eqquant.Rules`][], which go by paths.

        What is said of a leaf of its own, by its place in a prefix, by a rule or as the
        format that a function returns for it, holds for small leaves, for embeddings
        and in modules that are not known of, too.

        Vectors, biases and the parameters of norms are never quantized.
    - `format`: what `True` means.
    - `axis`: that matrix products contract. `"auto"` goes by the owner of each array;
        -2 where there is none.
    - `min_size`: arrays with fewer numbers are left as they are.
    - `embeddings`: whether to quantize `eqx.nn.Embedding`s too.
    - `unsupported`: what to do with layers that hand their weights to functions which
        take arrays only: convolutions, `WeightNorm`, `SpectralNorm`, and modules that
        are not known of, or have a `__call__` other than the class that is.

        - `"skip"` leaves their weights as they are.
        - `"on_call"` quantizes them, and lets the layers run as by
            [`eqquant.implicit`][]. So do the modules that a quantized weight is in,
            other than those of Equinox, for their calls may read it themselves:
            `jax.lax.ragged_dot(x, self.experts.weight, sizes)`. All stay instances of
            their classes.
        - `"error"` raises an error for a convolution.
    - `strict`: whether a rule that matches nothing is an error.

    **Returns:**

    `model`, with a [`eqquant.QuantizedArray`][] in the place of each array that was
    quantized. What was quantized already is left so. [`eqquant.report`][] tells of all.

    **Raises:**

    A `ValueError` if a weight is not finite, if a rule matches nothing, or for an
    unsupported layer. A warning if nothing is quantized, for want of a word on which
    of the matrices in modules that are not known of are weights.
    """
    model = opened(model)
    decisions = decide(
        model, filter_spec, format, axis, min_size, embeddings, unsupported, strict
    )
    if filter_spec is True or isinstance(filter_spec, AbstractFormat | str):
        _warn_of_nothing(model, decisions)
    # The same array in two places becomes the same quantized array in both.
    done = {}
    leaves = []
    callers = {id(module) for decision in decisions for module in decision.on_call}
    for decision in _progress(decisions):
        leaf = decision.leaf
        if decision.format is not None and decision.info is not None:
            key = (id(leaf), decision.format, decision.info.axis)
            if key not in done:
                done[key] = _quantize(leaf, decision.format, decision.info)
            leaf = done[key]
        leaves.append(leaf)
    return closed(rebuilt(model, leaves, on_call, lambda node: id(node) in callers))


def tree_dequantize(model: PyTree) -> PyTree:
    """Puts ordinary arrays in the place of all quantized ones. Of structs, structs; and
    `None` where a part of a tree has none of a quantized array."""
    model = opened(model)
    leaves = map(_dense, jtu.tree_leaves(model, is_leaf=is_quantized))
    return closed(rebuilt(model, leaves, not_on_call, is_on_call))


def _dense(x):
    if not isinstance(x, QuantizedArray):
        return x
    stored = jtu.tree_leaves(x.stored)
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in stored):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x.dequantize() if stored else None


def trainable_spec(model: PyTree) -> PyTree[bool]:
    """Which leaves of a model train: its floating-point arrays. A filter for
    `eqx.partition`, false for quantized arrays."""
    return jtu.tree_map(_is_trained, model, is_leaf=is_quantized)


def _is_trained(x):
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.issubdtype(x.dtype, jnp.inexact)
    return eqx.is_inexact_array(x)


def decide(
    model: PyTree,
    filter_spec: FilterSpec = True,
    format: AbstractFormat | str = NF4(),
    axis: Axis | Literal["auto"] = "auto",
    min_size: int = 1024,
    embeddings: bool = False,
    unsupported: Unsupported = "skip",
    strict: bool = True,
) -> list[Decision]:
    """What `tree_quantize` would do with each leaf, in order."""
    format = as_format(format)
    if unsupported not in get_args(Unsupported):
        raise ValueError(
            f"`unsupported` should be one of {get_args(Unsupported)}. Got "
            f"{unsupported!r}."
        )
    leaves = list(leaves_with_info(model, _is_weight))
    if axis != "auto":
        leaves = [(leaf, _with_axis(info, axis)) for leaf, info in leaves]
    if isinstance(filter_spec, Rules):
        wishes = _wishes_of_rules(filter_spec, format, leaves, strict)
    else:
        wishes = _wishes_of_prefix(filter_spec, format, model, leaves)
    decisions = []
    for (leaf, info), wish in zip(leaves, wishes, strict=True):
        caller = _caller(info) if unsupported == "on_call" else None
        obstacle = _obstacle(leaf, info, wish, min_size, embeddings, caller)
        if obstacle is None:
            readers = _readers(info, caller) if unsupported == "on_call" else ()
            decisions.append(Decision(leaf, info, wish.format, on_call=readers))
            continue
        reason, way_out = obstacle
        if info and unsupported == "error" and reason.startswith(_unsupported):
            raise ValueError(
                f"`{info.path}` cannot be quantized: it is {reason}. Leave it out by a "
                "rule, or pass `unsupported='skip'` or 'on_call'."
            )
        decisions.append(Decision(leaf, info, None, reason, way_out))
    return _tied_to_embeddings(decisions, wishes)


_unsupported = "the filter of a convolution"
_embedding = "an embedding"
_way_out = "Pass `unsupported='on_call'`"
_unknown = "is not a known owner of weights"


def _tied_to_embeddings(decisions, wishes):
    # An array that has to stay for the one takes no memory for the other.
    left_out = {
        id(d.leaf): d.info for d in decisions if d.reason.startswith(_embedding)
    }

    def revise(decision, wish):
        info = left_out.get(id(decision.leaf))
        if decision.format is None or info is None or wish.named:
            return decision
        reason = f"the array of the embedding `{info.path}`"
        return Decision(
            decision.leaf, decision.info, None, reason, "Pass `embeddings=True`"
        )

    return [revise(*pair) for pair in zip(decisions, wishes, strict=True)]


def _caller(info):
    # The module that hands a weight to functions which may take arrays only.
    if info is None:
        return None
    for module in info.ancestors:
        if isinstance(module, reparametrisations):
            return module
    if info.owner is None:
        return None
    known = calls_as_registered(info.owner, info.field)
    if known and not isinstance(info.owner, convolutions):
        return None
    return info.owner if callable(info.owner) else None


def _readers(info, caller):
    # And those that may read the weight past the layer that it is of: an outer one runs
    # as by `implicit` with all that is inside. The layers of Equinox call each other.
    modules = info.ancestors if info.owner is None else info.ancestors[:-1]
    readers = [m for m in modules if callable(m) and not calls_as_equinox(m)]
    return tuple(readers) if caller is None else (*readers, caller)


def _obstacle(leaf, info, wish, min_size, embeddings, caller) -> tuple[str, str] | None:
    if info is None:
        return "not an array", ""
    if is_quantized(leaf):
        return "quantized already", ""
    if not jnp.issubdtype(info.dtype, jnp.floating):
        return f"{info.dtype.name}, not floating-point", ""
    if wish.format is None:
        return wish.reason, ""
    owner = type(info.owner).__name__
    for module in info.ancestors:
        if isinstance(module, reparametrisations) and caller is None:
            return f"reparametrised by a {type(module).__name__}", _way_out
    if isinstance(info.owner, (*norms, *reparametrisations)):
        return f"a parameter of a {owner}", ""
    if len(info.shape) < 2:
        return "a vector", ""
    if info.field.startswith("bias"):
        return "a bias", ""
    if isinstance(info.owner, convolutions) and caller is None:
        return f"{_unsupported}, which takes arrays only", _way_out
    if wish.named:
        return None
    if isinstance(info.owner, AbstractStandIn):
        return f"held by a {owner}, which stands for a weight", ""
    rule = f'Rules([("{info.path}", {wish.format}), ...])'
    if math.prod(info.shape) < min_size:
        return f"fewer than {min_size} numbers", f"Pass `min_size`, or {rule}"
    if isinstance(info.owner, eqx.nn.Embedding) and not embeddings:
        tied = any(isinstance(module, eqx.nn.Shared) for module in info.ancestors)
        reason = f"{_embedding}, and what is tied to it" if tied else _embedding
        return reason, "Pass `embeddings=True`"
    if not info.known and caller is None:
        way_out = f'`register_owner({owner}, "{info.field}", axis)`, or {rule}'
        return f"{owner} {_unknown}", way_out
    return None


def _wishes_of_rules(rules, format, leaves, strict):
    wishes = []
    unmatched = set(range(len(rules.rules)))
    for _, info in leaves:
        index = None if info is None else rules.match(info)
        if index is None:
            wishes.append(_Wish(None, False, "no rule matches"))
            continue
        unmatched.discard(index)
        pattern, action = rules.rules[index]
        wishes.append(_wish(action, format, True, f"left out by the rule {pattern!r}"))
    infos = [info for _, info in leaves if info is not None]
    for index in sorted(unmatched):
        if strict and not any(rules.matches(index, info) for info in infos):
            pattern, _ = rules.rules[index]
            paths = [info.path for info in infos]
            near = difflib.get_close_matches(str(pattern), paths, cutoff=0) or paths
            raise ValueError(
                f"Of `filter_spec`, the rule {pattern!r} matches no array. There are "
                f"{', '.join(map(repr, near[:3]))}, for example. Pass `strict=False` "
                "for rules that may match nothing."
            )
    return wishes


def _wishes_of_prefix(filter_spec, format, model, leaves):
    wishes = []

    def extend(spec, subtree):
        sub = jtu.tree_leaves(subtree, is_leaf=is_quantized)
        alone = len(sub) == 1 and sub[0] is subtree
        for leaf in sub:
            action, named = spec, alone and spec is not filter_spec
            if _is_function(spec):
                action = spec(leaf) if eqx.is_array(leaf) or _is_struct(leaf) else None
                named = not _is_bool(action)
            wishes.append(_wish(action, format, named, "left out by `filter_spec`"))

    jtu.tree_map(extend, filter_spec, model, is_leaf=_is_spec_leaf)
    assert len(wishes) == len(leaves)
    return wishes


def _wish(action, format, named, reason):
    if action is None or (_is_bool(action) and not action):
        return _Wish(None, named, reason)
    if _is_bool(action):
        return _Wish(format, named)
    return _Wish(as_format(action), named)


def _is_spec_leaf(x: Any) -> bool:
    return x is None or isinstance(x, AbstractFormat | str) or _is_function(x)


def _is_function(x: Any) -> bool:
    # A module is a tree, though it may have a `__call__`.
    return callable(x) and not isinstance(x, eqx.Module)


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool | np.bool_)


def _with_axis(info, axis):
    if info is None or len(info.shape) < 2:
        return info
    return dataclasses.replace(info, axis=normalise_axis(axis, info.shape))


def _quantize(leaf, format, info):
    try:
        if not _is_struct(leaf):
            return quantize(leaf, format, axis=info.axis)
        q = jax.eval_shape(lambda w: quantize(w, format, axis=info.axis), leaf)
    except ValueError as e:
        raise ValueError(f"Could not quantize `{info.path}`: {e}") from e
    if not isinstance(leaf.sharding, NamedSharding):
        return q
    # There is nothing to be placed: how it is to be is declared.
    spec = full_spec(leaf.sharding.spec, q.ndim)
    return dataclasses.replace(q, sharding=leaf.sharding.update(spec=spec))


def _is_struct(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _is_weight(x: Any) -> bool:
    return is_quantized(x) or _is_struct(x)


def _warn_of_nothing(model, decisions):
    if callable(model) and jtu.all_leaves([model]):
        warnings.warn(
            f"`model` is a function, of type {type(model).__name__}, in which no "
            "arrays can be seen: nothing is quantized. Quantize the module that it was "
            "made of, first.",
            stacklevel=3,
        )
        return
    done = [d for d in decisions if d.format is not None or is_quantized(d.leaf)]
    left = [d for d in decisions if d.info is not None and d.is_unknown]
    if done or not left:
        return
    lines = [f"\n- `{d.info.path}`: {d.reason}. {d.way_out}." for d in left[:3]]
    if len(left) > 3:
        lines.append(f"\n- and {len(left) - 3} more.")
    warnings.warn(
        "Nothing is quantized: what is done with the matrices of `model` is not known."
        f"{''.join(lines)}",
        stacklevel=3,
    )


def _progress(decisions: list[Decision]) -> Iterator[Decision]:
    """Iterates, with a progress bar once that has taken two seconds."""
    sizes = [math.prod(d.info.shape) if d.info and d.format else 0 for d in decisions]
    start, done = time.monotonic(), 0
    bar = task = None
    for decision, size in zip(decisions, sizes):
        yield decision
        done += size
        if bar is None and time.monotonic() - start > 2:
            bar = _bar()
            task = bar.add_task("Quantizing", total=sum(sizes))
            bar.start()
        if bar is not None and task is not None:
            bar.update(task, completed=done)
    if bar is not None:
        bar.stop()


def _bar():
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
