"""Quantization for JAX and Equinox: a weight is swapped for a smaller array, and the
model, its layers and its training loop stay as they were.

The rooms of the package, from the top to the bottom. A room imports only from rooms
below it, through their `__init__.py`. Each room's docstring describes its purpose and
how to extend it.

    _cli        the command `eqquant`
    bench       the benchmarks behind `eqquant bench`
    demo        the language models behind `eqquant demo`
    _report     what a quantized model costs, and why; formats within a budget
    interop     files and other libraries' checkpoints <-> trees of arrays
    train       straight-through estimators, QAT, LoRA, 8 and 4-bit optimizers
    _tree       tree_quantize: which leaves of a model are weights, and in which format
    _trace      which products the arrays of a model enter, and with what inputs
    _implicit   run any JAX function on quantized operands
    _solvers    rounding that minimizes the error of products: GPTQ and others
    _ops        matmul, dot_general, conv and ragged products of quantized arrays
    _array      QuantizedArray, quantize, indexing, leading axes
    _product    the primitive behind every product; axes, sharding specs, partitioning
    kernels     the dispatch table, and the kernels for CPU, GPU and TPU
    formats     numbers <-> stored integer arrays

To add a format, start in `eqquant.formats`; a kernel, in `eqquant.kernels`; a reader or
writer of files, in `eqquant.interop`; a rule of `implicit`, in `eqquant._implicit`.
"""

import importlib
from typing import TYPE_CHECKING

from . import _interrupts as _interrupts, formats as formats
from ._array import (
    dequantize as dequantize,
    is_quantized as is_quantized,
    quantize as quantize,
    QuantizedArray as QuantizedArray,
    tree_prepack as tree_prepack,
)
from ._implicit import (
    implicit as implicit,
    qdot_general as qdot_general,
    qeinsum as qeinsum,
    qtake as qtake,
    register_rule as register_rule,
)
from ._ops import qconv as qconv, qmatmul as qmatmul
from ._tree import (
    LeafInfo as LeafInfo,
    register_owner as register_owner,
    Rules as Rules,
    trainable_spec as trainable_spec,
    tree_dequantize as tree_dequantize,
    tree_quantize as tree_quantize,
    tree_shard as tree_shard,
)
from .formats import (
    AbstractFormat as AbstractFormat,
    AbstractGrid as AbstractGrid,
    Binary as Binary,
    Dynamic8 as Dynamic8,
    FP4 as FP4,
    FP8 as FP8,
    Int as Int,
    Int4 as Int4,
    Int8 as Int8,
    MXFP4 as MXFP4,
    MXFP8 as MXFP8,
    Nested as Nested,
    NF4 as NF4,
    NVFP4 as NVFP4,
    Rotated as Rotated,
    RSRBinary as RSRBinary,
    RSRTernary as RSRTernary,
    Square4 as Square4,
    Ternary as Ternary,
    Trellis as Trellis,
)
from .kernels import (
    export as export,
    Problem as Problem,
    register_kernel as register_kernel,
)


__version__ = "0.1.0"

# Not every program needs these rooms, so each is imported when it, or one of its names
# below, is first used. Type checkers do not follow `__getattr__`, so they read these
# imports.
if TYPE_CHECKING:
    from . import interop as interop, train as train
    from ._report import (
        allocate as allocate,
        audit as audit,
        evaluate as evaluate,
        Evaluation as Evaluation,
        explain as explain,
        Predictions as Predictions,
        predictions as predictions,
        report as report,
        Sensitivity as Sensitivity,
        sensitivity as sensitivity,
        squared_gradients as squared_gradients,
    )
    from ._solvers import (
        AbstractMethod as AbstractMethod,
        AWQ as AWQ,
        GPTQ as GPTQ,
        HQQ as HQQ,
        ScaleSearch as ScaleSearch,
    )
    from ._trace import (
        calibrate as calibrate,
        Gram as Gram,
        Sequential as Sequential,
        Statistics as Statistics,
    )
    from .interop import load as load, save as save
    from .train import straight_through as straight_through

_later = {
    "interop": ("load", "save"),
    "train": ("straight_through",),
    "_report": (
        *("allocate", "audit", "evaluate", "Evaluation"),
        *("explain", "Predictions", "predictions", "report"),
        *("Sensitivity", "sensitivity", "squared_gradients"),
    ),
    "_solvers": ("AbstractMethod", "AWQ", "GPTQ", "HQQ", "ScaleSearch"),
    "_trace": ("calibrate", "Gram", "Sequential", "Statistics"),
}
_room_of = {name: room for room, names in _later.items() for name in (room, *names)}


def __getattr__(name):
    if name not in _room_of:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = importlib.import_module(f".{_room_of[name]}", __name__)
    return room if name in _later else globals().setdefault(name, getattr(room, name))


def __dir__():
    return sorted({*globals(), *_room_of})
