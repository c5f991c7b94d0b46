"""`implicit(fn)`: runs any JAX function on quantized operands.

The function's jaxpr is interpreted with one rule for each primitive. An operand of a
primitive that has no rule is dequantized.

May import `_ops` and the rooms below it.

What primitives that only move numbers do stands in `_moves`, once for this room and for
`_trace`, in a few terms. `_structure` does that to packed arrays.

To add a rule, write a function `(interpreter, eqn, values) -> results` and decorate it
with `add_rule(primitive, parameter=...)`, in the file of its kind (`_products`,
`_structure`, `_writes`, ...), with all parameters that it heeds. If the primitive only
moves numbers, add it to the table in `_moves`.
Code outside the package uses `eqquant.register_rule`, whose functions see the operands
and parameters alone.
"""

from ._functions import qdot_general as qdot_general, qeinsum as qeinsum, qtake as qtake
from ._interpreter import as_arrays as as_arrays, bind as bind, opened as opened
from ._loops import sizes_of_scan as sizes_of_scan
from ._moves import (
    Broadcast as Broadcast,
    Concatenate as Concatenate,
    DynamicSlice as DynamicSlice,
    Gather as Gather,
    moves as moves,
    moves_of as moves_of,
    Reshape as Reshape,
    Slice as Slice,
    Transpose as Transpose,
)
from ._table import (
    add_rule as add_rule,
    register_rule as register_rule,
    rules_of as rules_of,
)
from ._transform import implicit as implicit
