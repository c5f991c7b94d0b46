from typing import Any, Literal

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import is_quantized
from .._product import Axis
from .._tree import decide, Decision, FilterSpec
from ..formats import AbstractFormat, NF4
from ._fake_quantized import fake_quantized, FakeQuantized
from ._low_precision import LowPrecision


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
    """Prepares a model for quantization-aware training: its weights are rounded in
    every use, and gradients reach the master weights by the straight-through estimator.
    The modules and the training loop stay the same. After the training,
    [`eqquant.train.tree_freeze`][] packs the weights.

    !!! Example

        ```python
        model = eqx.nn.MLP(64, 10, 128, depth=2, key=key)
        model = eqquant.train.tree_fake_quantize(model, eqquant.Ternary())
        model = train(model)
        model = eqquant.train.tree_freeze(model)
        ```

    **Arguments:**

    - `model`, `filter_spec`, `format`, `axis`, `min_size`, `embeddings`, `unsupported`,
        `strict`: as in [`eqquant.tree_quantize`][], which selects the same leaves;
        except that `unsupported` cannot be `"on_call"`.
    - `activation`: a format in which products quantize their other operand, row by row
        (dynamic activation quantization).
    - `step_sizes`: whether the scales are learned along with the weights, as in
        [`eqquant.train.learned_step_size`][]. By default the format computes them from
        the weights each time. (Scales are smaller than weights. An optimizer whose
        steps do not depend on that, such as Adam, needs a small learning rate for
        them.)
    - `clip`: whether numbers beyond the first or the last point of their block have
        the derivative zero instead of one. With `step_sizes` they always do.

    **Returns:**

    `model`, with a [`eqquant.train.FakeQuantized`][] in place of each selected array.
    Arrays that are quantized or fake-quantized already are unchanged.

    **Raises:**

    The errors of [`eqquant.tree_quantize`][], except that weights need not be finite;
    and a `ValueError` if a format does not round, cannot be clipped, or has no scales
    to learn.
    """
    decisions = decide(
        model,
        filter_spec,
        format,
        axis,
        min_size,
        embeddings,
        unsupported=unsupported,
        strict=strict,
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
    """Packs the weights of a model after quantization-aware training.

    !!! Example

        ```python
        model = eqquant.train.tree_freeze(model)
        eqquant.save("model.eqq", model)
        ```

    **Arguments:**

    - `model`: any PyTree, as from [`eqquant.train.tree_fake_quantize`][] or
        [`eqquant.train.tree_compute`][].

    **Returns:**

    `model`, with a [`eqquant.QuantizedArray`][] in place of each
    [`eqquant.train.FakeQuantized`][] and [`eqquant.train.LowPrecision`][]. It decodes
    to the numbers that the forward pass of the training used, bit for bit.

    **Raises:**

    A `ValueError` if a weight is not finite.
    """
    return jtu.tree_map(
        lambda x: x.freeze() if _is_frozen(x) else x, model, is_leaf=_is_frozen
    )


def _is_frozen(x: Any) -> bool:
    return isinstance(x, FakeQuantized | LowPrecision)


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
