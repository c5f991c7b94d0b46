from ._base import (
    AbstractFormat as AbstractFormat,
    encode as encode,
    round_trip as round_trip,
    Stored as Stored,
)
from ._binary import Binary as Binary
from ._bits import pack_bits as pack_bits, unpack_bits as unpack_bits
from ._bnb_fp4 import BnbFP4 as BnbFP4
from ._bnb_scale import BnbScale as BnbScale, row_blocks as row_blocks
from ._composite import AbstractComposite as AbstractComposite
from ._dynamic8 import Dynamic8 as Dynamic8
from ._exact import AbstractExact as AbstractExact
from ._fp4 import FP4 as FP4
from ._fp8 import FP8 as FP8
from ._gguf import (
    AbstractGGUF as AbstractGGUF,
    AbstractGGUFBlocks as AbstractGGUFBlocks,
)
from ._grid import AbstractGrid as AbstractGrid
from ._held import encode_held as encode_held, not_held_text as not_held_text
from ._int import Int as Int
from ._int4 import Int4 as Int4
from ._int8 import Int8 as Int8
from ._layout import (
    by_row as by_row,
    from_rows as from_rows,
    shape_of as shape_of,
    to_rows as to_rows,
)
from ._mxfp4 import MXFP4 as MXFP4
from ._mxfp8 import MXFP8 as MXFP8
from ._names import as_format as as_format, known_formats as known_formats
from ._nested import Nested as Nested
from ._nf4 import NF4 as NF4
from ._nvfp4 import NVFP4 as NVFP4
from ._packing import (
    as_product as as_product,
    digits as digits,
    pack as pack,
    per_byte as per_byte,
    unpack as unpack,
)
from ._q2_k import Q2_K as Q2_K
from ._q3_k import Q3_K as Q3_K
from ._q4_0 import Q4_0 as Q4_0
from ._q4_1 import Q4_1 as Q4_1
from ._q4_k import Q4_K as Q4_K
from ._q5_0 import Q5_0 as Q5_0
from ._q5_1 import Q5_1 as Q5_1
from ._q5_k import Q5_K as Q5_K
from ._q6_k import Q6_K as Q6_K
from ._q8_0 import Q8_0 as Q8_0
from ._rows import encode_rows as encode_rows
from ._rsr import (
    AbstractRSR as AbstractRSR,
    RSRBinary as RSRBinary,
    RSRTernary as RSRTernary,
)
from ._scale import from_bits as from_bits, to_bits as to_bits
from ._scaled import AbstractScaled as AbstractScaled
from ._ternary import Ternary as Ternary
from ._tq1_0 import TQ1_0 as TQ1_0
from ._tq2_0 import TQ2_0 as TQ2_0
