"""What a program does with its operands: which products they enter, and what these
multiply them with.

`_view` says which values of a program are an operand but for the order of its axes,
`_follow` what primitives make of such a value, and `_meeting` how it enters a product.
`_walk` goes through a program and finds the `_site` of each product, and `_uses` tells
of a function what a walk finds. `_capture` runs a program and adds up what the products
multiply operands with (`_moments`), for `calibrate` and `Sequential`, which read off a
walk what there is to be summed (`_plan`). For `Sequential`, `_unrolled` makes one list
of equations of a program, `_program` tells where it is cut, and a `_segment` is what
runs from one cut to the next. `_calls` traces and compiles what they run, and `_folds`
finds which arrays could take a scale of the inputs of others.

May import `_implicit` and the rooms below it.

To follow a leaf through another primitive, say in `_moves.py` of `_implicit` what it
does.
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
