from . import (
    _cpu_rsr as _cpu_rsr,
    _cpu_sweep as _cpu_sweep,
    _cpu_tiles as _cpu_tiles,
)
from ._problem import Problem as Problem, Product as Product
from ._table import (
    Choice as Choice,
    choose as choose,
    Kernel as Kernel,
    platforms as platforms,
    register_kernel as register_kernel,
)
