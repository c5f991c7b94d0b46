from ._base import (
    AbstractFormat as AbstractFormat,
    encode as encode,
    round_trip as round_trip,
    Stored as Stored,
)
from ._binary import Binary as Binary
from ._dynamic8 import Dynamic8 as Dynamic8
from ._exact import AbstractExact as AbstractExact
from ._grid import AbstractGrid as AbstractGrid
from ._int4 import Int4 as Int4
from ._int8 import Int8 as Int8
from ._layout import (
    by_row as by_row,
    from_rows as from_rows,
    shape_of as shape_of,
    to_rows as to_rows,
)
from ._names import as_format as as_format, known_formats as known_formats
from ._nested import Nested as Nested
from ._nf4 import NF4 as NF4
from ._packing import (
    digits as digits,
    pack as pack,
    per_byte as per_byte,
    unpack as unpack,
)
from ._rsr import (
    AbstractRSR as AbstractRSR,
    RSRBinary as RSRBinary,
    RSRTernary as RSRTernary,
)
from ._scale import from_bits as from_bits, to_bits as to_bits
from ._scaled import AbstractScaled as AbstractScaled
from ._ternary import Ternary as Ternary
