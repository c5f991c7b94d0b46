"""Training with quantized weights: quantization-aware (`_qat`), of adapters (`_lora`),
with optimizers whose states have 8 or 4 bits (`_optimizers`); and training in fewer
bits: products (`_low_precision`), activations (`_save_quantized`), and communication
between devices (`_collectives`).

These rooms do not know each other, except that adapters and fake-quantized weights know
`_low_precision`; `_tree_compute` and `_tune` also know adapters. All may import the
files of this folder, `_tree` and the rooms below it, and optax inside functions that
make an optimizer. To add an estimator, write a function that ends in
`estimate(value, surrogate)` of `_straight_through.py`, which gives `value` the
derivatives of `surrogate`.
"""

from .._tree import trainable_spec as trainable_spec
from ._collectives import (
    quantized_all_gather as quantized_all_gather,
    quantized_pmean as quantized_pmean,
    quantized_psum as quantized_psum,
    quantized_psum_scatter as quantized_psum_scatter,
)
from ._lora import (
    LoRA as LoRA,
    lora as lora,
    lora_only as lora_only,
    lora_spec as lora_spec,
    merge_lora as merge_lora,
    with_lora as with_lora,
)
from ._low_precision import (
    Delayed as Delayed,
    DotGeneral as DotGeneral,
    LowPrecision as LowPrecision,
    update_delayed as update_delayed,
)
from ._optimizers import (
    adamw4bit as adamw4bit,
    adamw8bit as adamw8bit,
    ema8bit as ema8bit,
    lion8bit as lion8bit,
    muon8bit as muon8bit,
    scale_by_adam4bit as scale_by_adam4bit,
    scale_by_adam8bit as scale_by_adam8bit,
    scale_by_lion8bit as scale_by_lion8bit,
    scale_by_muon8bit as scale_by_muon8bit,
)
from ._qat import (
    bitnet as bitnet,
    FakeQuantized as FakeQuantized,
    learned_step_size as learned_step_size,
    tree_fake_quantize as tree_fake_quantize,
    tree_freeze as tree_freeze,
)
from ._save_quantized import save_quantized as save_quantized
from ._stochastic import Stochastic as Stochastic
from ._straight_through import straight_through as straight_through
from ._tree_compute import tree_compute as tree_compute, tree_preround as tree_preround
from ._tune import tune as tune
