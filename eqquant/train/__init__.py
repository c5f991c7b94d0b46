"""Training with quantized weights: straight-through estimators, quantization-aware
training, LoRA adapters and optimizers with states in 8 and 4 bits; and training in
fewer bits: products (`_tree_compute`), activations (`_save_quantized`), and what
devices send each other (`_collectives`).

The products of a training step are four (`_contractions`), of which a primitive
(`_linear`) makes derivatives and `vmap`. Products of other dimensions become these
(`_rounded_dot`), and `eqquant.implicit` finds them (`_low_precision_rules`), and those
of adapters (`_lora_rules`) and of fake-quantized weights (`_fake_quantized_rules`).

May import `_tree` and the rooms below it, and optax inside functions that make an
optimizer. To add an estimator, write a function that ends in `estimate(value,
surrogate)` of `_straight_through.py`, which gives `value` the derivatives of
`surrogate`.
"""

from .._tree import trainable_spec as trainable_spec
from . import (
    _fake_quantized_rules as _fake_quantized_rules,
    _lora_rules as _lora_rules,
    _low_precision_rules as _low_precision_rules,
)
from ._adam4bit import adamw4bit as adamw4bit, scale_by_adam4bit as scale_by_adam4bit
from ._adam8bit import adamw8bit as adamw8bit, scale_by_adam8bit as scale_by_adam8bit
from ._bitnet import bitnet as bitnet
from ._collectives import (
    quantized_all_gather as quantized_all_gather,
    quantized_pmean as quantized_pmean,
    quantized_psum as quantized_psum,
    quantized_psum_scatter as quantized_psum_scatter,
)
from ._delayed import Delayed as Delayed
from ._dot_general import DotGeneral as DotGeneral
from ._ema8bit import ema8bit as ema8bit
from ._fake_quantized import FakeQuantized as FakeQuantized
from ._learned_step_size import learned_step_size as learned_step_size
from ._lion8bit import lion8bit as lion8bit, scale_by_lion8bit as scale_by_lion8bit
from ._lora import lora as lora, lora_spec as lora_spec
from ._lora_adapters import (
    lora_only as lora_only,
    merge_lora as merge_lora,
    with_lora as with_lora,
)
from ._lora_array import LoRA as LoRA
from ._low_precision import LowPrecision as LowPrecision
from ._muon8bit import muon8bit as muon8bit, scale_by_muon8bit as scale_by_muon8bit
from ._save_quantized import save_quantized as save_quantized
from ._stochastic import Stochastic as Stochastic
from ._straight_through import straight_through as straight_through
from ._tree_compute import tree_compute as tree_compute, tree_preround as tree_preround
from ._tree_fake_quantize import (
    tree_fake_quantize as tree_fake_quantize,
    tree_freeze as tree_freeze,
)
from ._tune import tune as tune
from ._update_delayed import update_delayed as update_delayed
