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
    """Puts low-rank adapters next to the weights of a model, which may be quantized
    (QLoRA) or not (LoRA). The adapters train, and the weights stay as they are. The
    layers are used as before; at first, the model computes what it did.

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
    - `rank`: of the adapters. A weight of size `n` times `k` gets `rank * (n + k)`
        numbers that train.
    - `filter_spec`, `min_size`, `embeddings`: which weights get one, as of
        [`eqquant.tree_quantize`][]. It does not matter which of them are quantized, and
        a format in `filter_spec` means the same as `True`.
    - `alpha`: the product of the adapters is scaled by `alpha / rank`. By default this
        is one.
    - `rank_stabilized`: scale by `alpha / sqrt(rank)` instead (rsLoRA).
    - `dora`: to train the norm of each row, too (DoRA).
    - `dtype`: of the adapters.
    - `key`: for their first values.

    **Returns:**

    The model, with a [`eqquant.train.LoRA`][] in the place of each weight that was
    chosen; and the filter of what trains: a PyTree of booleans, for `eqx.partition`.
    (For more than that to train, such as norms, set those to true.)

    **Raises:**

    A `ValueError` if there is no weight to adapt, if a rule matches nothing, or if the
    model has adapters already.

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
    # It does not matter which weights are quantized already.
    chosen = decide(
        model,
        filter_spec,
        min_size=min_size,
        embeddings=embeddings,
        is_done=lambda x: False,
    )
    number = sum(decision.format is not None for decision in chosen)
    if number == 0:
        raise ValueError(
            "`filter_spec` should select some weight of `model`. It selects none; "
            "`eqquant.report(model)` tells what there is."
        )
    keys = iter(jr.split(key, number))
    leaves, treedef = jtu.tree_flatten(model, is_leaf=is_quantized)

    def adapt(leaf, decision):
        if decision.format is None:
            return leaf
        axis = leaf.axis if is_quantized(leaf) else decision.info.axis
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
    """The filter of what trains in a model with adapters: they do, and all else is
    frozen.

    **Arguments:**

    - `model`: as returned by [`eqquant.train.lora`][].

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


def is_lora(x: Any) -> bool:
    return isinstance(x, LoRA)


def check_no_adapters(model: PyTree) -> None:
    if any(map(is_lora, jtu.tree_leaves(model, is_leaf=is_lora))):
        raise ValueError(
            "`model` should have no adapters yet. To go on with those, take the model "
            "as it is; for others, `eqquant.train.merge_lora` it first."
        )


def rows_first(shape: tuple[int, ...], axis: Any, path: str) -> tuple[int, int]:
    """The sizes of a matrix: of its rows, and of the contracted axis."""
    if len(shape) < 2 or axis not in (-1, -2):
        raise ValueError(
            "Adapters are of matrices, and stacks of them, of which a product "
            "contracts one of the last two axes. Got "
            f"`{path}`, of shape {shape} and axis {axis}."
        )
    *_, n, k = shape if axis == -1 else (*shape[:-2], shape[-1], shape[-2])
    return n, k


def with_magnitude(w: LoRA, dtype: Any) -> LoRA:
    """DoRA, of which the magnitude is that of the base."""
    norm = square_norms(w.base, w.axis)
    magnitude = jnp.sqrt(from_bits(norm, jnp.dtype(jnp.float32))).astype(dtype)
    return dataclasses.replace(w, magnitude=magnitude, norm=norm)


def _check_rank(rank):
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"`rank` should be an integer. Got {rank!r}.")
    if rank < 1:
        raise ValueError(f"`rank` should be 1 or more. Got {rank}.")
