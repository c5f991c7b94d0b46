"""Products of quantized arrays other than `@`: `qmatmul`, general contractions,
convolutions and ragged products, each written in terms of the one primitive.

It imports `_array` and what is below.
"""

from ._conv import conv as conv, qconv as qconv
from ._dot import (
    dot as dot,
    DotDimensionNumbers as DotDimensionNumbers,
    precision_name as precision_name,
)
from ._matmul import qmatmul as qmatmul
from ._ragged import ragged_dot as ragged_dot
