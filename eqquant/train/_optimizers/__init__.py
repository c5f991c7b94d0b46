"""Optimizers of optax whose states are stored in 8 or 4 bits.

An optimizer is a function of the numbers of one array, `_one`, and a signature as optax
has it. `_quantized_state` makes a transformation of optax from it, whose moments
(`_moments`) are quantized or dense; `_advance` steps through all arrays.

To add one: write such a function, as `_lion8bit` does.
"""

from ._adam import (
    adamw4bit as adamw4bit,
    adamw8bit as adamw8bit,
    scale_by_adam4bit as scale_by_adam4bit,
    scale_by_adam8bit as scale_by_adam8bit,
)
from ._ema8bit import ema8bit as ema8bit
from ._lion8bit import lion8bit as lion8bit, scale_by_lion8bit as scale_by_lion8bit
from ._moments import optax_library as optax_library
from ._muon8bit import muon8bit as muon8bit, scale_by_muon8bit as scale_by_muon8bit
