import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._array import AbstractArrayLike, identity, is_quantized
from .._product import as_tuple, Axis, normalise_axis
from ..formats import AbstractFormat, as_format, NF4
from ._decision import Decision, Skip
from ._example import contracted, Example
from ._owners import (
    activations,
    calls_as_equinox,
    calls_as_registered,
    convolutions,
    LeafInfo,
    leaves_with_info,
    needing_dense,
    norms,
    Owner,
    reparametrisations,
    states,
)
from ._requests import Request, requests
from ._rules import Rules
from ._unmet import check_unmet


FilterSpec: TypeAlias = AbstractFormat | str | Rules | PyTree
Unsupported: TypeAlias = Literal["skip", "on_call", "error"]


def decide(
    model: PyTree,
    filter_spec: FilterSpec = True,
    format: AbstractFormat | str = NF4(),
    axis: Axis | Literal["auto"] = "auto",
    min_size: int = 1024,
    embeddings: bool = False,
    unsupported: Unsupported = "skip",
    strict: bool | None = True,
    *,
    example: Example | None = None,
    is_done: Callable[[Any], bool] = is_quantized,
    known: Sequence[Axis | None] = (),
    goal: str = "quantized",
) -> list[Decision]:
    """Decides what [`eqquant.tree_quantize`][] does with each leaf, in order.

    **Arguments:**

    - `strict`: as in `tree_quantize`. If false, a filter that names arrays in vain is a
        warning. `None` to skip the check.
    - `is_done`: which nodes of `model` are leaves that count as quantized already. The
        other arguments are as in `tree_quantize`.
    - `known`: for each leaf, the axis along which it is known to be a weight, or
        `None`.
    - `goal`: what weights should become, for messages.
    """
    format = as_format(format)
    check_unsupported(unsupported, get_args(Unsupported))
    is_leaf = lambda x: is_quantized(x) or _is_struct(x) or is_done(x)
    leaves = list(leaves_with_info(model, is_leaf))
    if example is not None:
        each = example.uses(model, [leaf for leaf, _ in leaves])
        infos = [_as_used(info, use) for (_, info), use in zip(leaves, each)]
        leaves = [(leaf, info) for (leaf, _), info in zip(leaves, infos)]
    if known:
        both = zip(leaves, known, strict=True)
        leaves = [(leaf, _as_known(info, along)) for (leaf, info), along in both]
    if axis != "auto":
        leaves = [(leaf, _with_axis(info, axis)) for leaf, info in leaves]
    found = requests(
        filter_spec,
        model,
        [info for _, info in leaves],
        argument="filter_spec",
        is_leaf=is_leaf,
        is_spec_leaf=_is_spec_leaf,
        strict=bool(strict),
    )
    on_call = unsupported == "on_call"
    decisions, named = [], set()
    for index, ((leaf, info), request) in enumerate(zip(leaves, found, strict=True)):
        if info is None or is_done(leaf):
            skip = _not_an_array if info is None else _done
            decisions.append(Decision(leaf, info, skip))
            continue
        requested, is_named = _requested(request, leaf, format)
        if is_named:
            named.add(index)
        caller = _caller(info) if on_call else None
        skip = _obstacle(info, requested, caller)
        if skip is None and not is_named:
            skip = _exception(info, requested, min_size, embeddings)
        if skip is not None and skip.kind == "convolution" and unsupported == "error":
            raise ValueError(
                f"`{info.path}` cannot be quantized: it is {skip.reason}. Exclude it "
                "by a rule, or pass 'skip' or 'on_call' for `unsupported`."
            )
        readers = _readers(info, caller) if on_call and skip is None else ()
        asks = request.names(filter_spec)
        decisions.append(Decision(leaf, info, skip or requested, readers, asks))
    check_unmet(filter_spec, found, decisions, strict, goal)
    return _tied_to_embeddings(decisions, named)


def check_unsupported(unsupported: str, allowed: tuple[str, ...]) -> None:
    """Checks the argument `unsupported`.

    **Raises:**

    A `ValueError` unless it is one of the allowed values.
    """
    if unsupported not in allowed:
        raise ValueError(
            f"`unsupported` should be one of {allowed}. Got {unsupported!r}."
        )


_not_an_array = Skip("not an array", "not an array")
_done = Skip("quantized", "quantized already")


def _requested(request: Request, leaf: Any, format: AbstractFormat):
    """Returns the requested format, or a `Skip`; and whether it is for this leaf
    alone."""
    value, named = request.value, request.named
    if _is_function(value):
        value = value(leaf)
        named = not _is_bool(value)
    if value is None or (_is_bool(value) and not value):
        return Skip("not requested", request.otherwise), named
    return format if _is_bool(value) else as_format(value), named


_pass_on_call = "Pass `unsupported='on_call'`"


def _obstacle(info, requested, caller) -> Skip | None:
    """Returns the reason to skip a leaf that no request overrides, if any."""
    if not jnp.issubdtype(info.dtype, jnp.floating):
        return Skip("dtype", f"{info.dtype.name}, not floating-point")
    if isinstance(requested, Skip):
        return requested
    if isinstance(info.owner, states):
        return Skip("state", "a state, which calls replace")
    if info.multiplied:
        return None if len(info.shape) > 1 else Skip("vector", "a vector")
    owner = type(info.owner).__name__
    if isinstance(info.owner, (*norms, *activations, *reparametrisations)):
        return Skip("norm", f"a parameter of a {owner}")
    if len(info.shape) < 2:
        return Skip("vector", "a vector")
    if info.field.startswith("bias"):
        return Skip("bias", "a bias")
    for module in info.ancestors:
        if isinstance(module, reparametrisations) and caller is None:
            reason = f"reparametrised by a {type(module).__name__}"
            return Skip("reparametrised", reason, _pass_on_call)
    if isinstance(info.owner, convolutions) and caller is None:
        reason = "the filter of a convolution, which has to be a dense array"
        return Skip("convolution", reason, _pass_on_call)
    return None


def _exception(info, format, min_size, embeddings) -> Skip | None:
    """Returns the reason to skip a leaf that only a request for this leaf overrides."""
    owner = type(info.owner).__name__
    if isinstance(info.owner, AbstractArrayLike):
        return Skip("adapter", f"held by a {owner}, which stands for a weight")
    rule = f'Rules([("{info.path}", {format}), ...])'
    if math.prod(info.shape) < min_size:
        reason = f"fewer than {min_size} numbers"
        return Skip("small", reason, f"Pass `min_size`, or {rule}")
    table = info.looked_up or isinstance(info.owner, eqx.nn.Embedding)
    if table and not embeddings:
        tied = any(isinstance(module, eqx.nn.Shared) for module in info.ancestors)
        reason = "an embedding, and arrays tied to it" if tied else "an embedding"
        return Skip("embedding", reason, "Pass `embeddings=True`")
    if not info.known and info.multiplied is False:
        return Skip("unknown owner", _not_multiplied(info), rule)
    if not info.known:
        hint = f'`register_owner({owner}, "{info.field}", axis)`, or {rule}'
        cls = type(info.owner)
        # (Other packages have a class `Linear`, too.)
        name = f"{cls.__module__}.{owner}" if owner in vars(eqx.nn) else owner
        return Skip("unknown owner", f"{name} is not a known owner of weights", hint)
    return None


def _not_multiplied(info):
    if info.among_arrays:
        return "multiplied by the example, but only with other arrays of the model"
    products = ("dot", "ragged_dot", "conv_")
    if any(name.startswith(products) for name in info.others):
        return "multiplied by the example, but along unknown axes"
    none = "not multiplied with inputs by the example"
    return f"{none}, but used in `{info.others[0]}`" if info.others else none


def _tied_to_embeddings(decisions, named):
    # An array that stays dense for an embedding takes no memory for its other uses.
    paths = {
        identity(decision.leaf): decision.info.path
        for decision in decisions
        if decision.skip is not None and decision.skip.kind == "embedding"
    }
    revised = []
    for index, decision in enumerate(decisions):
        path = paths.get(identity(decision.leaf))
        if path is not None and decision.format is not None and index not in named:
            reason = f"the array of the embedding `{path}`"
            skip = Skip("embedding", reason, "Pass `embeddings=True`")
            decision = dataclasses.replace(decision, outcome=skip, on_call=())
        revised.append(decision)
    return revised


def _caller(info: LeafInfo | None) -> Owner | None:
    """Returns the module that passes this weight to functions that may need dense
    arrays."""
    if info is None:
        return None
    layer = needing_dense(info)
    if layer is not None or info.owner is None:
        return layer
    if calls_as_registered(info.owner, info.field):
        return None
    return info.owner if callable(info.owner) else None


def _readers(info, caller):
    """Returns the modules that may read a weight: `caller`, and the modules around the
    layer, which may bypass its call. Equinox's own modules do not."""
    modules = info.ancestors if info.owner is None else info.ancestors[:-1]
    readers = [m for m in modules if callable(m) and not calls_as_equinox(m)]
    return tuple(readers) if caller is None else (*readers, caller)


def _as_used(info, use):
    if info is None or use is None or not info.shape:
        return info
    known = None
    if info.known and info.owner is not None:
        known = as_tuple(normalise_axis(info.axis, info.shape))
    axes = contracted(use, info.shape, known)
    if axes is None:
        # (Without an example, all matrices outside of modules count as weights.)
        known = info.known and info.owner is not None
        among = bool(use.products or use.changed)
        looked_up = not among and use.others == ("gather",)
        return dataclasses.replace(
            info,
            axis=-1 if looked_up and not known else info.axis,
            known=known or looked_up,
            multiplied=False,
            others=use.others,
            among_arrays=among,
            looked_up=looked_up,
        )
    axis = axes[0] if len(axes) == 1 else axes
    return dataclasses.replace(info, multiplied=True, known=True, axis=axis)


def _as_known(info, axis):
    if info is None or axis is None:
        return info
    return dataclasses.replace(info, axis=axis, known=True)


def _with_axis(info, axis):
    if info is None or len(info.shape) < 2:
        return info
    return dataclasses.replace(info, axis=normalise_axis(axis, info.shape))


def _is_spec_leaf(x: Any) -> bool:
    return x is None or isinstance(x, AbstractFormat | str) or _is_function(x)


def _is_function(x: Any) -> bool:
    # A module is a tree, though it may have a `__call__`.
    return callable(x) and not isinstance(x, eqx.Module)


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool | np.bool_)


def _is_struct(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
