"""`implicit(fn)`: runs any JAX function on quantized operands.

The function's jaxpr is interpreted with one rule for each primitive. An operand of a
primitive that has no rule is dequantized.

This room imports `_ops` and the rooms below it.

To add a rule: write a function and decorate it with `register_rule(primitive)`, in the
file of its kind (`_products`, `_structure`, `_gather`, ...). Code outside the package
decorates with `eqquant.register_rule` in the same way.
"""

from ._functions import qdot_general as qdot_general, qeinsum as qeinsum, qtake as qtake
from ._interpreter import opened as opened
from ._loops import sizes_of_scan as sizes_of_scan
from ._table import register_rule as register_rule
from ._transform import implicit as implicit
