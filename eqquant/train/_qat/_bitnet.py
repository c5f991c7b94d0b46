from jaxtyping import PyTree

from ..._tree import FilterSpec
from ...formats import Int8, Ternary
from ._tree_fake_quantize import tree_fake_quantize


def bitnet(model: PyTree, filter_spec: FilterSpec = True) -> PyTree:
    """Quantization-aware training as in BitNet b1.58: ternary weights, scaled by the
    mean absolute value of each matrix, and 8-bit activations, scaled by the largest
    absolute value of each token.

    The recipe is for training from scratch. Its authors put a norm before each linear
    layer, and leave the embeddings and the head unquantized. They use a higher learning
    rate than for a dense model, and halfway through the training they lower it and turn
    weight decay off.

    !!! Example

        ```python
        rules = eqquant.Rules([("head.*", False), ("*", True)])
        model = eqquant.train.bitnet(model, rules)
        ```

    **Arguments:**

    - `model`: any PyTree.
    - `filter_spec`: which leaves to quantize, as in [`eqquant.tree_quantize`][].

    **Returns:**

    The result of [`eqquant.train.tree_fake_quantize`][] with
    `Ternary(scale="tensor")` and `activation=Int8()`.

    ??? cite "Reference"

        The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits. Ma et al.,
        2024. Section 2.

        The Era of 1-bit LLMs: Training Tips, Code and FAQ. Ma et al., 2024.
    """
    return tree_fake_quantize(
        model, filter_spec, Ternary(scale="tensor"), activation=Int8()
    )
