from typing import Any, Literal

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import is_quantized
from .._product import Axis
from .._tree import decide, Decision, FilterSpec
from ..formats import AbstractFormat, NF4
from ._fake_quantized import fake_quantized, FakeQuantized


def tree_fake_quantize(
    model: PyTree,
    filter_spec: FilterSpec = True,
    format: AbstractFormat | str = NF4(),
    *,
    activation: AbstractFormat | str | None = None,
    step_sizes: bool = False,
    clip: bool = False,
    axis: Axis | Literal["auto"] = "auto",
    min_size: int = 1024,
    embeddings: bool = False,
    unsupported: Literal["skip", "error"] = "skip",
    strict: bool = True,
) -> PyTree:
    """Quantization-aware training: the weights of a model are rounded wherever they are
    used, and train all the same. What comes back is the same model, of the same
    modules, for the same training loop. [`eqquant.train.tree_freeze`][] packs it when
    that is done.

    !!! Example

        ```python
        model = eqx.nn.MLP(64, 10, 128, depth=2, key=key)
        model = eqquant.train.tree_fake_quantize(model, eqquant.Ternary())
        model = train(model)
        model = eqquant.train.tree_freeze(model)
        ```

    **Arguments:**

    - `model`, `filter_spec`, `format`, `axis`, `min_size`, `embeddings`, `unsupported`,
        `strict`: as of [`eqquant.tree_quantize`][]. What that would quantize is what
        this does; except that `unsupported` cannot be `"on_call"`.
    - `activation`: a format that products round the other operand in, row by row:
        dynamic activation quantization.
    - `step_sizes`: whether the scales are learned with the weights, as by
        [`eqquant.train.learned_step_size`][]. By default they are found anew from the
        weights each time, as the format says. (Scales are smaller than weights: with an
        optimizer whose steps do not depend on that, such as Adam, learn slowly.)
    - `clip`: whether numbers beyond the first or the last point that their block can
        represent have the derivative zero, not one. With `step_sizes` they always have.

    **Returns:**

    `model`, with a [`eqquant.train.FakeQuantized`][] in the place of each array that is
    to be quantized. Those that are there already are left so, and so is what is
    quantized.

    **Raises:**

    As [`eqquant.tree_quantize`][], except that weights need not be finite; and a
    `ValueError` if a format does not round, or cannot be clipped, or has no scales to
    be learned.
    """
    decisions = decide(
        model,
        filter_spec,
        format,
        axis,
        min_size,
        embeddings,
        unsupported,
        strict,
        is_done=_is_done,
    )
    new = [
        decision.leaf
        if decision.format is None
        else _fake_quantized(decision, activation, step_sizes, clip)
        for decision in decisions
    ]
    treedef = jtu.tree_structure(model, is_leaf=_is_done)
    return jtu.tree_unflatten(treedef, new)


def tree_freeze(model: PyTree) -> PyTree:
    """Packs every weight that was trained to be quantized.

    !!! Example

        ```python
        model = eqquant.train.tree_freeze(model)
        eqquant.save("model.eqq", model)
        ```

    **Arguments:**

    - `model`: any PyTree, with [`eqquant.train.FakeQuantized`][] in it.

    **Returns:**

    `model`, with a [`eqquant.QuantizedArray`][] in the place of each, which stands for
    the very numbers that the last step of training saw.

    **Raises:**

    A `ValueError` if a weight is not finite.
    """
    return jtu.tree_map(
        lambda x: x.freeze() if _is_fake_quantized(x) else x,
        model,
        is_leaf=_is_fake_quantized,
    )


def _is_fake_quantized(x: Any) -> bool:
    return isinstance(x, FakeQuantized)


def _is_done(x: Any) -> bool:
    return is_quantized(x) or _is_fake_quantized(x)


def _fake_quantized(decision: Decision, activation, step_sizes, clip) -> FakeQuantized:
    info = decision.info
    assert info is not None and decision.format is not None
    try:
        return fake_quantized(
            decision.leaf,
            decision.format,
            axis=info.axis,
            activation=activation,
            step_sizes=step_sizes,
            clip=clip,
        )
    except ValueError as e:
        raise ValueError(f"Could not quantize `{info.path}`: {e}") from e
