"""`implicit(fn)`: runs any JAX function on quantized operands.

The function's jaxpr is interpreted with one rule for each primitive. An operand of a
primitive that has no rule is dequantized.

May import `_ops` and the rooms below it.

`_moves` describes, in a few terms, the primitives that only move numbers, for this room
and for `_trace`. `_structure` applies these moves to packed arrays.

To add a rule, write a function `(interpreter, eqn, values) -> results` and decorate it
with `add_rule(primitive, takes="parameter parameter")`, naming all parameters that it
heeds, in the file of its kind (`_products`, `_structure`, `_writes`, ...). If the
primitive only moves numbers, add it to the table in `_moves`. Code outside the package
uses `eqquant.register_rule`, whose functions see only the operands and parameters.
"""

from ._functions import qdot_general as qdot_general, qeinsum as qeinsum, qtake as qtake
from ._interpreter import as_arrays as as_arrays, bind as bind
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
from ._program import opened as opened
from ._table import (
    add_rule as add_rule,
    register_rule as register_rule,
    rules_of as rules_of,
)
from ._transform import implicit as implicit
