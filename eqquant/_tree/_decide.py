import dataclasses
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._array import identity
from ..formats import AbstractFormat, as_format
from ._choices import Choice, choices
from ._decision import Decision, Skip
from ._owners import (
    activations,
    caller_of,
    convolutions,
    LeafInfo,
    norms,
    readers_of,
    reparametrisations,
    states,
    why_held,
)
from ._request import Request
from ._unmet import check_unmet


def decide(model: PyTree, *args: Any, **kwargs: Any) -> list[Decision]:
    """Returns the decision on each leaf of a model, in order. The arguments are the
    fields of [`Request`][]."""
    return decisions(Request(model, *args, **kwargs))


def decisions(request: Request) -> list[Decision]:
    """Returns the decision on each leaf of the model, in order."""
    format = as_format(request.format)
    leaves = request.leaves()
    chosen = choices(
        request.filter_spec,
        request.model,
        [info for _, info in leaves],
        argument="filter_spec",
        is_leaf=request.is_leaf,
        is_spec_leaf=_is_spec_leaf,
        strict=bool(request.strict),
    )
    both = zip(leaves, chosen, strict=True)
    found = [_decided(request, choice, format, *leaf) for leaf, choice in both]
    each = [decision for decision, _ in found]
    check_unmet(request, chosen, each)
    return _tied_to_embeddings(found)


_not_an_array = Skip("not an array", "not an array")
_done = Skip("quantized", "quantized already")


def _decided(
    request: Request,
    choice: Choice,
    format: AbstractFormat,
    leaf: Any,
    info: LeafInfo | None,
) -> tuple[Decision, bool]:
    """Returns the decision on a leaf, and whether the filter requests it for this leaf
    alone."""
    if info is None:
        return Decision(leaf, info, _not_an_array), False
    if request.is_done(leaf):
        return Decision(leaf, info, _done), False
    requested, alone = _requested(choice, leaf, format)
    on_call = request.unsupported == "on_call"
    caller = caller_of(info) if on_call else None
    skip = _obstacle(info, requested, caller)
    if skip is None and not alone:
        skip = _exception(info, requested, request.min_size, request.embeddings)
    if skip is not None and skip.kind == "convolution":
        if request.unsupported == "error":
            raise ValueError(
                f"`{info.path}` cannot be quantized: it is {skip.reason}. Exclude it "
                "by a rule, or pass 'skip' or 'on_call' for `unsupported`."
            )
    readers = readers_of(info, caller) if on_call and skip is None else ()
    return Decision(leaf, info, skip or requested, readers, choice.named), alone


def _requested(choice: Choice, leaf: Any, format: AbstractFormat):
    """Returns the requested format, or a `Skip`; and whether it is for this leaf
    alone."""
    value, alone = choice.value, choice.alone
    if _is_function(value):
        value = value(leaf)
        alone = not _is_bool(value)
    if value is None or (_is_bool(value) and not value):
        return Skip("not requested", choice.otherwise), alone
    return format if _is_bool(value) else as_format(value), alone


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
    if (why := why_held(info)) is not None:
        return Skip("held", *why)
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


def _tied_to_embeddings(decisions):
    # An array that stays dense for an embedding takes no memory for its other uses.
    paths = {
        identity(decision.leaf): decision.info.path
        for decision, _ in decisions
        if decision.skip is not None and decision.skip.kind == "embedding"
    }
    revised = []
    for decision, alone in decisions:
        path = paths.get(identity(decision.leaf))
        if path is not None and decision.format is not None and not alone:
            reason = f"the array of the embedding `{path}`"
            skip = Skip("embedding", reason, "Pass `embeddings=True`")
            decision = dataclasses.replace(decision, outcome=skip, on_call=())
        revised.append(decision)
    return revised


def _is_spec_leaf(x: Any) -> bool:
    return x is None or isinstance(x, AbstractFormat | str) or _is_function(x)


def _is_function(x: Any) -> bool:
    # A module is a tree, though it may have a `__call__`. A class is a mistake for one
    # of its values, which `as_format` explains.
    return callable(x) and not isinstance(x, eqx.Module | type)


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool | np.bool_)
