"""`tree_quantize`, `tree_dequantize` and `tree_shard`: functions of whole models.

A `Request` (`_request`) holds the arguments. `_owners` finds the weights of matrix
products among the leaves of a PyTree from the modules that own them, and `_example`
finds them by tracing a call. `_choices` evaluates a filter (`_rules`, or a prefix of
the tree) for each leaf, and `_decide` turns the choices into decisions (`_decision`):
the outcome for each leaf, with the reason.

A `Plan` (`_plan`) holds the decisions, and the modules that have to run through
`implicit` (`_callers`). It rounds the leaves (`_rounding`, or `_sequential` with
statistics that are taken meanwhile) and rebuilds the model (`_on_call`).

This room imports `_trace` and the rooms below it.

To add a layer: call `eqquant.register_owner(type, field, axis)`, from anywhere.
"""

from ._callers import smallest_on_call as smallest_on_call
from ._decide import (
    decide as decide,
)
from ._decision import Decision as Decision
from ._jitted import closed as closed, opened as opened
from ._on_call import (
    is_on_call as is_on_call,
    layers_on_call as layers_on_call,
    not_on_call as not_on_call,
    on_call as on_call,
    put_on_call as put_on_call,
    rebuilt as rebuilt,
    runs_every_method as runs_every_method,
)
from ._owners import (
    LeafInfo as LeafInfo,
    leaves_with_info as leaves_with_info,
    needing_dense as needing_dense,
    register_owner as register_owner,
    why_held as why_held,
)
from ._plan import plan as plan
from ._printable import printable as printable
from ._quantize import (
    trainable_spec as trainable_spec,
    tree_dequantize as tree_dequantize,
    tree_quantize as tree_quantize,
)
from ._request import (
    FilterSpec as FilterSpec,
    Request as Request,
    Unsupported as Unsupported,
)
from ._rounding import (
    check as check,
    check_alone as check_alone,
    grams_of as grams_of,
    rounded as rounded,
)
from ._rules import Rules as Rules
from ._shard import tree_shard as tree_shard
from ._unmet import by_use as by_use
from ._warnings import warn_of_guesses as warn_of_guesses
