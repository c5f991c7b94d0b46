"""Traces how a program uses its operands: which products each of them enters, and the
inputs that these products multiply it with.

A view (`_view`) describes a value of a program that is an operand up to the order of
its axes. `_follow` maps a view through a primitive, and `_meeting` describes how a view
enters a product. `_walk` goes through a program and finds the `_site` of each product;
`_uses` returns the result of a walk for a function. `_capture` runs a program and sums
the moments (`_moments`) of the inputs, for `calibrate` and `Sequential`; `_plan`
chooses the sums from a walk. For `Sequential`, `_unrolled` flattens a program into one
list of equations, `_program` decides where to cut it, and a `_segment` runs from one
cut to the next. `_calls` traces and compiles the calls, and `_folds` finds the arrays
that can absorb a scale of the inputs of other arrays.

May import `_implicit` and the rooms below it.

To follow a leaf through another primitive, describe the primitive in `_moves.py` of
`_implicit`.
"""

from ._calibrate import calibrate as calibrate
from ._calls import check_batches as check_batches
from ._sequential import InSequence as InSequence, Sequential as Sequential
from ._site import Product as Product
from ._statistics import (
    Gram as Gram,
    is_along as is_along,
    Statistics as Statistics,
)
from ._uses import is_array as is_array, Use as Use, uses as uses
