"""Products of training in fewer bits: weights stay floating-point arrays, and operands
and cotangents are rounded.

The products of a training step are four (`_contractions`), of which a primitive
(`_linear`) makes derivatives and `vmap`. Products of other dimensions become these
(`_rounded_dot`, `_rounded_conv`), and `eqquant.implicit` finds them (`_rules`).
`_weight` is the weight in a model, and `_operand` one of its arrays as it is rounded.
"""

from . import _rules as _rules
from ._checked import (
    Backward as Backward,
    checked_backward as checked_backward,
    checked_format as checked_format,
    checked_forward as checked_forward,
)
from ._delayed import Delayed as Delayed
from ._dot_general import DotGeneral as DotGeneral
from ._history import History as History
from ._product import Roundings as Roundings
from ._update_delayed import update_delayed as update_delayed
from ._weight import (
    is_low_precision as is_low_precision,
    LowPrecision as LowPrecision,
    plain as plain,
)
