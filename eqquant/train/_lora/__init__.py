"""LoRA: adapters of two small matrices (`_matrix`) beside frozen weights (`_array`).
`eqquant.implicit` finds their products by `_rules`."""

from . import _rules as _rules
from ._adapters import (
    lora_only as lora_only,
    merge_lora as merge_lora,
    with_lora as with_lora,
)
from ._array import LoRA as LoRA
from ._lora import (
    adapted as adapted,
    is_lora as is_lora,
    lora as lora,
    lora_spec as lora_spec,
    with_magnitude as with_magnitude,
)
from ._matrix import matrix_of as matrix_of
