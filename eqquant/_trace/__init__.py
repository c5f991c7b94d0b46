"""Traces how a program uses its operands: which products each of them enters, and the
inputs that these products multiply it with.

The words of this room:

- *leaf*: an operand of a program, such as an array of a model.
- *view*: a value of a program that is a leaf up to the order of its axes, splits,
    merges, and choices along axes (`_view`).
- *factor*, *index*: the part of an axis of the leaf that makes up an axis of a view;
    and a choice along an axis, by a scan, a slice or a gather.
- *meeting*: how a view enters a product (`_meeting`); *piece*: the part of an axis that
    the product contracts, if not the whole (`_pieces`).
- *site*: a product in a program, as one leaf enters it (`_site`); *place*: the number
    of its equation.
- *lead*: the leading axes of a Gram: the number of different inputs along each axis of
    the leaf that is not contracted.
- *slot*: a leaf, and the axes that are contracted. A sum of Grams is for one slot.
- *birth*: the product or sum that first scaled a value by a leaf (`_folds`).
- *turn*: when a weight is quantized by `Sequential`: the steps of the scans around it.
- *lane*: one of two runs of a program side by side: of the original model, and of the
    model as quantized so far.

`_propagate` carries values of any kind through a program, with a rule for its
equations. `_follow` maps a view through an equation. `_walk` finds the sites of each
leaf, and `_uses` returns them for a function. `_evaluate` runs a program. With it,
`_capture` sums the Grams of the inputs (`_gram_term`), for `calibrate` and
`Sequential`; `_plan` chooses the sums from a walk. For `Sequential`, `_unrolled`
flattens a program into one list of equations, `_program` decides where to cut it, and a
`_segment` runs from one cut to the next. `_calls` traces and compiles the calls, and
`_folds` finds the arrays that can absorb a scale of the inputs of other arrays.

May import `_implicit` and the rooms below it.

To follow a leaf through another primitive, describe the primitive in `_moves.py` of
`_implicit`.
"""

from ._calibrate import calibrate as calibrate
from ._calls import check_batches as check_batches
from ._propagate import propagate as propagate
from ._sequential import InSequence as InSequence, Sequential as Sequential
from ._site import Product as Product
from ._statistics import (
    Gram as Gram,
    is_along as is_along,
    Statistics as Statistics,
)
from ._uses import is_array as is_array, Use as Use, uses as uses
