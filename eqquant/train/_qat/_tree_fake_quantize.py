from typing import Any, Literal

import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._array import is_quantized
from ..._product import Axis
from ..._tree import (
    closed,
    Decision,
    FilterSpec,
    opened,
    plan,
    Request,
    Unsupported,
    warn_of_guesses,
)
from ...formats import AbstractFormat, NF4
from .._low_precision import LowPrecision
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
    unsupported: Unsupported = "skip",
    strict: bool = True,
    example: Any = None,
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
        `strict`, `example`: as in [`eqquant.tree_quantize`][], which selects the same
        leaves and modules. So convolutions, `jnp.einsum`s, experts and layers of other
        classes train quantized with an `example`, or with `unsupported="on_call"`.
    - `activation`: a format in which products quantize their other operand, row by row
        (dynamic activation quantization). Convolutions do not.
    - `step_sizes`: whether the scales are learned along with the weights, as in
        [`eqquant.train.learned_step_size`][]. By default the format computes them from
        the weights each time. (Scales are smaller than weights. Optimizers such as
        Adam, whose steps do not depend on the size of a parameter, need a small
        learning rate for them.)
    - `clip`: whether numbers beyond the first or the last point of their block have
        the derivative zero instead of one. With `step_sizes` they always do.

    **Returns:**

    `model`, with a [`eqquant.train.FakeQuantized`][] in place of each selected array.
    Arrays that are quantized or fake-quantized already are unchanged. Modules that will
    have to run through [`eqquant.implicit`][] with quantized weights do so already.

    **Raises:**

    The errors of [`eqquant.tree_quantize`][], except that weights need not be finite;
    and a `ValueError` if a format does not round, cannot be clipped, or has no scales
    to learn. Warns if less than half of the model's matrices train quantized because
    their use is unknown or not supported.
    """
    request = Request(
        opened(model),
        filter_spec,
        format,
        axis,
        min_size,
        embeddings,
        unsupported,
        strict,
        example,
        _is_done,
    )
    # (Packed weights need more modules on call than weights that train.)
    planned = plan(request)
    warn_of_guesses(request, planned.decisions)
    new = [
        decision.leaf
        if decision.format is None
        else _fake_quantized(decision, activation, step_sizes, clip)
        for decision in planned.decisions
    ]
    return closed(planned.rebuilt(new))


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
    to the numbers that the forward pass of the training used, bit for bit. Modules that
    run through [`eqquant.implicit`][] still do.

    **Raises:**

    A `ValueError` if a weight is not finite.
    """
    freeze = lambda x: x.freeze() if _is_frozen(x) else x
    return closed(jtu.tree_map(freeze, opened(model), is_leaf=_is_frozen))


def _is_frozen(x: Any) -> bool:
    return isinstance(x, FakeQuantized | LowPrecision)


def _is_done(x: Any) -> bool:
    return is_quantized(x) or isinstance(x, FakeQuantized)


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
