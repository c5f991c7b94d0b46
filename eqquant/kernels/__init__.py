from . import (
    _cpu_float_tiles as _cpu_float_tiles,
    _cpu_integer_tiles as _cpu_integer_tiles,
    _cpu_rsr as _cpu_rsr,
    _cpu_sweep as _cpu_sweep,
    _gpu_decoded as _gpu_decoded,
    _gpu_float as _gpu_float,
    _gpu_int8 as _gpu_int8,
    _native as _native,
    _native_library as _native_library,
    _tpu_blocks as _tpu_blocks,
    _tpu_tiles as _tpu_tiles,
    _tpu_xla as _tpu_xla,
)
from ._problem import Problem as Problem, Product as Product
from ._table import (
    Choice as Choice,
    choose as choose,
    Kernel as Kernel,
    platforms as platforms,
    register_kernel as register_kernel,
)


_native_library.register_at_import()
