from . import train as train
from ._array import (
    dequantize as dequantize,
    is_quantized as is_quantized,
    QuantizedArray as QuantizedArray,
)
from ._conv import qconv as qconv
from ._implicit import (
    implicit as implicit,
    qdot_general as qdot_general,
    qeinsum as qeinsum,
    qtake as qtake,
    register_rule as register_rule,
)
from ._ops import qmatmul as qmatmul
from ._owners import LeafInfo as LeafInfo, register_owner as register_owner
from ._prepack import tree_prepack as tree_prepack
from ._quantize import quantize as quantize
from ._rules import Rules as Rules
from ._tree import (
    trainable_spec as trainable_spec,
    tree_dequantize as tree_dequantize,
    tree_quantize as tree_quantize,
)
from .formats import (
    AbstractExact as AbstractExact,
    AbstractFormat as AbstractFormat,
    AbstractGrid as AbstractGrid,
    AbstractRSR as AbstractRSR,
    AbstractScaled as AbstractScaled,
    Binary as Binary,
    Dynamic8 as Dynamic8,
    Int4 as Int4,
    Int8 as Int8,
    Nested as Nested,
    NF4 as NF4,
    RSRBinary as RSRBinary,
    RSRTernary as RSRTernary,
    Ternary as Ternary,
)
from .interop import load as load, save as save
from .kernels import Problem as Problem, register_kernel as register_kernel
from .report import audit as audit, explain as explain, report as report
from .train import is_frozen as is_frozen, straight_through as straight_through
