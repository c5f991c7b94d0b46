import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TYPE_CHECKING

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import identity
from .._product import as_tuple, normalise_axis
from ._jitted import closed
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

    @property
    def name(self) -> str:
        """The function that is called, for messages."""
        name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
        return "the call" if self.fn is _call else f"`{name}`"

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

    def described(
        self, model: PyTree, leaves: Sequence[tuple[Any, LeafInfo | None]]
    ) -> list[tuple[Any, LeafInfo | None]]:
        """Returns the leaves of a model, each with its description as the call uses
        it."""
        uses = self.uses(model, [leaf for leaf, _ in leaves])
        return [(leaf, _as_used(info, use)) for (leaf, info), use in zip(leaves, uses)]

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


def _as_used(info, use):
    if info is None or use is None or not info.shape:
        return info
    known = None
    if info.known and info.owner is not None:
        known = as_tuple(normalise_axis(info.axis, info.shape))
    axes = _contracted(use, info.shape, known)
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


def _contracted(
    use: "Use", shape: tuple[int, ...], known: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Returns the axes of a leaf that its products with inputs contract; `None` if it
    enters no such product. `use` is how the call uses it, with the model as its first
    argument, and `known` the axes that its class is registered to contract, if any."""
    found = [p for p in (*use.products, *use.changed) if p.is_by_inputs]
    if not found:
        return None
    first = next((p for p in found if p.whole), found[0])
    axes = tuple(sorted(i - len(shape) for i in first.contracted))
    # Whether an axis of size one is contracted makes no difference.
    long = lambda axes: {i for i in axes if shape[i] != 1}
    return known if known is not None and long(axes) == long(known) else axes
