"""Quantization-aware training: weights that are rounded in the forward pass
(`_fake_quantized`), and trained through the rounding. `eqquant.implicit` finds their
products by `_rules`."""

from . import _rules as _rules
from ._bitnet import bitnet as bitnet
from ._fake_quantized import FakeQuantized as FakeQuantized
from ._learned_step_size import learned_step_size as learned_step_size
from ._tree_fake_quantize import (
    tree_fake_quantize as tree_fake_quantize,
    tree_freeze as tree_freeze,
)
