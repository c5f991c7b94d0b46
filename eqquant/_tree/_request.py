import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args, Literal, TypeAlias

import jax
from jaxtyping import PyTree

from .._array import check_number, is_quantized
from .._product import as_integers, Axis, normalise_axis
from ..formats import AbstractFormat, NF4
from ._example import Example
from ._owners import LeafInfo, leaves_with_info
from ._rules import Rules


FilterSpec: TypeAlias = AbstractFormat | str | Rules | PyTree
Unsupported: TypeAlias = Literal["skip", "on_call", "error"]


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A request to change weights of a model, by [`eqquant.tree_quantize`][] or a
    similar function.

    - `model`: the model, without functions made by `eqx.filter_jit`.
    - `strict`: as in `tree_quantize`. If false, a filter that names arrays in vain is a
        warning. `None` to skip the check.
    - `is_done`: which nodes of `model` are leaves that count as quantized already.
    - `known`: for each leaf, the axis along which it is known to be a weight, or
        `None`.
    - `goal`: what weights should become, for messages.

    The other fields are the arguments of `tree_quantize`.
    """

    model: PyTree
    filter_spec: FilterSpec = True
    format: AbstractFormat | str = NF4()
    axis: Axis | Literal["auto"] = "auto"
    min_size: int = 1024
    embeddings: bool = False
    unsupported: Unsupported = "skip"
    strict: bool | None = True
    example: Any = None
    is_done: Callable[[Any], bool] = is_quantized
    known: Sequence[Axis | None] = ()
    goal: str = "quantized"

    def __post_init__(self):
        allowed = get_args(Unsupported)
        if self.unsupported not in allowed:
            raise ValueError(
                f"`unsupported` should be one of {allowed}. Got {self.unsupported!r}."
            )
        if self.axis != "auto":
            as_integers(self.axis)
        check_number("min_size", self.min_size)

    @functools.cached_property
    def call(self) -> Example | None:
        """The call of the model that is given as `example`, if any."""
        return None if self.example is None else Example(self.example)

    def is_leaf(self, x: Any) -> bool:
        """Whether a node of the model is a leaf."""
        return is_quantized(x) or isinstance(x, jax.ShapeDtypeStruct) or self.is_done(x)

    def leaves(self) -> list[tuple[Any, LeafInfo | None]]:
        """Returns each leaf of the model with its description, or `None` if it is not
        an array."""
        leaves = [*leaves_with_info(self.model, self.is_leaf)]
        if self.call is not None:
            leaves = self.call.described(self.model, leaves)
        known = self.known or [None] * len(leaves)
        both = zip(leaves, known, strict=True)
        return [(leaf, self._along(info, axis)) for (leaf, info), axis in both]

    def _along(self, info, known):
        if info is None:
            return None
        if known is not None:
            info = dataclasses.replace(info, axis=known, known=True)
        if self.axis == "auto" or len(info.shape) < 2:
            return info
        return dataclasses.replace(info, axis=normalise_axis(self.axis, info.shape))
