import dataclasses
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from .._array import is_quantized
from .._tree import decide, FilterSpec
from ..formats import from_bits
from ._lora_array import LoRA, square_norms
from ._low_precision import is_low_precision, plain


def lora(
    model: PyTree,
    rank: int,
    filter_spec: FilterSpec = True,
    *,
    alpha: float | int | None = None,
    rank_stabilized: bool = False,
    dora: bool = False,
    min_size: int = 1024,
    embeddings: bool = False,
    dtype: Any = jnp.float32,
    key: PRNGKeyArray,
) -> tuple[PyTree, PyTree[bool]]:
    """Adds low-rank adapters to the weights of a model, which may be quantized (QLoRA)
    or dense (LoRA). Only the adapters train. The layers are called as before, and the
    model computes the same function until the first step.

    !!! Example

        ```python
        model = eqquant.tree_quantize(model, "nf4")
        model, spec = eqquant.train.lora(model, rank=16, key=key)
        adapters, frozen = eqx.partition(model, spec)
        state = optimizer.init(adapters)

        @eqx.filter_value_and_grad
        def loss(adapters, frozen, x, y):
            model = eqx.combine(adapters, frozen)
            ...
        ```

    **Arguments:**

    - `model`: any PyTree.
    - `rank`: the rank of the adapters. An `n` by `k` weight gets `rank * (n + k)`
        trainable numbers.
    - `filter_spec`, `min_size`, `embeddings`: which weights get adapters, as in
        [`eqquant.tree_quantize`][]. Quantized and dense weights, and those of
        [`eqquant.train.tree_compute`][], are treated alike, and a format in
        `filter_spec` means the same as `True`.
    - `alpha`: the product of the adapters is scaled by `alpha / rank`. Defaults to
        `rank`.
    - `rank_stabilized`: whether to scale by `alpha / sqrt(rank)` instead (rsLoRA).
    - `dora`: whether to train the norm of each row, too (DoRA).
    - `dtype`: the dtype of the adapters.
    - `key`: a random key for their initial values.

    **Returns:**

    The model, with a [`eqquant.train.LoRA`][] in place of each selected weight, and a
    PyTree of booleans for `eqx.partition` that is true for the adapters. (To train
    other arrays as well, such as norms, set their leaves to `True`.)

    **Raises:**

    A `ValueError` if no weight is selected, if a rule matches nothing, or if the model
    has adapters already.

    ??? cite "Reference"

        LoRA: Low-Rank Adaptation of Large Language Models. Hu et al., 2022.

        QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023.

        A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA. Kalajdzievski,
        2023.

        DoRA: Weight-Decomposed Low-Rank Adaptation. Liu et al., 2024.
    """
    _check_rank(rank)
    check_no_adapters(model)
    alpha = rank if alpha is None else alpha
    scale = float(alpha / (math.sqrt(rank) if rank_stabilized else rank))
    # It does not matter which weights are quantized already, or compute in fewer bits.
    chosen = decide(
        jtu.tree_map(plain, model, is_leaf=is_weight),
        filter_spec,
        min_size=min_size,
        embeddings=embeddings,
        is_done=lambda x: False,
    )
    number = sum(decision.format is not None for decision in chosen)
    if number == 0:
        raise ValueError(
            "`filter_spec` should select at least one weight of `model`. It selects "
            "none; `eqquant.report(model)` lists them."
        )
    keys = iter(jr.split(key, number))
    leaves, treedef = jtu.tree_flatten(model, is_leaf=is_weight)

    def adapt(leaf, decision):
        if decision.format is None:
            return leaf
        axis = leaf.axis if is_weight(leaf) else decision.info.axis
        n, k = rows_first(leaf.shape, axis, decision.info.path)
        *stack, _, _ = leaf.shape
        bound = 1 / math.sqrt(max(1, k))
        a = jr.uniform(next(keys), (*stack, rank, k), dtype, -bound, bound)
        b = jnp.zeros((*stack, n, rank), dtype)
        adapted = LoRA(leaf, a, b, None, None, axis=axis, scale=scale)
        return with_magnitude(adapted, dtype) if dora else adapted

    leaves = [adapt(*pair) for pair in zip(leaves, chosen, strict=True)]
    model = jtu.tree_unflatten(treedef, leaves)
    return model, lora_spec(model)


def lora_spec(model: PyTree) -> PyTree[bool]:
    """The filter for training adapters: true for their arrays, false for every other
    leaf.

    **Arguments:**

    - `model`: a model with adapters, as from [`eqquant.train.lora`][].

    **Returns:**

    A PyTree of booleans, for `eqx.partition` and `eqx.filter`.
    """
    where = lambda w: (w.a, w.b, w.magnitude)

    def spec(node):
        frozen = jtu.tree_map(lambda _: False, node)
        if not is_lora(node):
            return frozen
        trains = jtu.tree_map(lambda _: True, where(node))
        return eqx.tree_at(where, frozen, trains, is_leaf=lambda x: x is None)

    return jtu.tree_map(spec, model, is_leaf=is_lora)


def is_weight(x: Any) -> bool:
    """Whether this takes the place of a weight, quantized or computing in fewer bits,
    that may have an adapter."""
    return is_quantized(x) or is_low_precision(x)


def is_lora(x: Any) -> bool:
    return isinstance(x, LoRA)


def check_no_adapters(model: PyTree) -> None:
    if any(map(is_lora, jtu.tree_leaves(model, is_leaf=is_lora))):
        raise ValueError(
            "`model` should have no adapters. To keep training them, use the model as "
            "it is; to add new ones, call `eqquant.train.merge_lora` first."
        )


def rows_first(shape: tuple[int, ...], axis: Any, path: str) -> tuple[int, int]:
    """The number of rows of a matrix, and the size of its contracted axis."""
    if len(shape) < 2 or axis not in (-1, -2):
        raise ValueError(
            "Adapters need a matrix, or a stack of matrices, whose products contract "
            f"one of the last two axes. Got `{path}`, of shape {shape} and axis {axis}."
        )
    *_, n, k = shape if axis == -1 else (*shape[:-2], shape[-1], shape[-2])
    return n, k


def with_magnitude(w: LoRA, dtype: Any) -> LoRA:
    """Turns LoRA into DoRA. The initial magnitudes are the row norms of the base."""
    norm = square_norms(w.base, w.axis)
    magnitude = jnp.sqrt(from_bits(norm, jnp.dtype(jnp.float32))).astype(dtype)
    return dataclasses.replace(w, magnitude=magnitude, norm=norm)


def _check_rank(rank):
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"`rank` should be an integer. Got {rank!r}.")
    if rank < 1:
        raise ValueError(f"`rank` should be 1 or more. Got {rank}.")
