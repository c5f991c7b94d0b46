from ._problem import Problem as Problem, Product as Product
from ._table import (
    Choice as Choice,
    choose as choose,
    Kernel as Kernel,
    platforms as platforms,
    register_kernel as register_kernel,
)
