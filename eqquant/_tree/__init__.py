"""`tree_quantize` and its relatives: which leaves of a PyTree are weights of matrix
products (`_owners`), what was asked for each (`_rules`), and what becomes of it.

It imports `_implicit` and what is below.

To teach it a layer: `eqquant.register_owner(type, field, axis)`.
"""

from ._jitted import opened as opened
from ._owners import (
    LeafInfo as LeafInfo,
    leaves_with_info as leaves_with_info,
    register_owner as register_owner,
)
from ._quantize import (
    decide as decide,
    Decision as Decision,
    FilterSpec as FilterSpec,
    trainable_spec as trainable_spec,
    tree_dequantize as tree_dequantize,
    tree_quantize as tree_quantize,
)
from ._rules import Rules as Rules
from ._shard import tree_shard as tree_shard
