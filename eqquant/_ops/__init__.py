"""Products of quantized arrays other than `@`: `qmatmul`, general contractions,
convolutions and ragged products.

May import `_array` and the rooms below it. To add an operation, write a file that
expresses it by `matmul` or `qmatmul_rows`, or by decoding tiles, and export it here.
"""

from ._conv import conv as conv, qconv as qconv
from ._dot import (
    dot as dot,
    DotDimensionNumbers as DotDimensionNumbers,
    precision_name as precision_name,
)
from ._matmul import qmatmul as qmatmul
from ._ragged import ragged_dot as ragged_dot
