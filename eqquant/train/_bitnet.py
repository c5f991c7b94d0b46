from jaxtyping import PyTree

from .._tree import FilterSpec
from ..formats import Int8, Ternary
from ._tree_fake_quantize import tree_fake_quantize


def bitnet(model: PyTree, filter_spec: FilterSpec = True) -> PyTree:
    """Quantization-aware training as of BitNet b1.58: ternary weights, times the mean
    absolute value of each matrix, and activations of 8 bits, times the largest absolute
    value of each token.

    It is meant for training from the start. The authors put a norm before each linear
    layer, and keep embeddings and the head as they are. They train with a learning rate
    above that of a dense model, which falls to a lower one halfway; there the weight
    decay ends, too.

    !!! Example

        ```python
        rules = eqquant.Rules([("head.*", False), ("*", True)])
        model = eqquant.train.bitnet(model, rules)
        ```

    **Arguments:**

    - `model`: any PyTree.
    - `filter_spec`: what to quantize, as of [`eqquant.tree_quantize`][].

    **Returns:**

    What [`eqquant.train.tree_fake_quantize`][] does, for `Ternary(scale="tensor")` and
    `activation=Int8()`.

    ??? cite "Reference"

        The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits. Ma et al.,
        2024. Section 2.

        The Era of 1-bit LLMs: Training Tips, Code and FAQ. Ma et al., 2024.
    """
    return tree_fake_quantize(
        model, filter_spec, Ternary(scale="tensor"), activation=Int8()
    )
