"""Formats convert numbers to stored integer arrays, and back.

Everything here is a pure function of arrays, and knows nothing of products, models or
files. A format is a value (`_base`); most are grids (`_grid`): codes, with a scale and
perhaps an offset for each block. A `Layout` describes how a format's arrays lie in
memory. `gguf` holds the types of GGUF files.

This room imports JAX, Equinox and NumPy, and no other room.

To add a format, write a subclass of `AbstractGrid` (`fit`, `to_codes`, `to_points`), or
of `AbstractFormat` for anything else (`encode`, `decode`, `shape`), in its own file.
Export it below, and enter it in the table of `tests/helpers.py`, over which every law
is tested. Code outside the package only needs the subclass: formats are found by their
classes.
"""

from ._adjustable import (
    AbstractAdjustable as AbstractAdjustable,
    Parameters as Parameters,
)
from ._base import (
    AbstractComposite as AbstractComposite,
    AbstractExact as AbstractExact,
    AbstractFormat as AbstractFormat,
    AbstractScaled as AbstractScaled,
    ByteScales as ByteScales,
    Stored as Stored,
)
from ._binary import Binary as Binary
from ._bit_fields import (
    BitField as BitField,
    Code as Code,
    stream_fields as stream_fields,
)
from ._bits import pack_bits as pack_bits, unpack_bits as unpack_bits
from ._blocks import spread as spread
from ._bnb_fp4 import BnbFP4 as BnbFP4
from ._bnb_scale import BnbScale as BnbScale, row_blocks as row_blocks
from ._dither import AbstractDithered as AbstractDithered
from ._dynamic8 import Dynamic8 as Dynamic8
from ._exl3 import EXL3 as EXL3
from ._fp4 import FP4 as FP4
from ._fp8 import FP8 as FP8
from ._grid import AbstractGrid as AbstractGrid
from ._held import (
    as_held as as_held,
    encode_held as encode_held,
    not_held_text as not_held_text,
)
from ._int import Int as Int
from ._int4 import Int4 as Int4
from ._int8 import Int8 as Int8
from ._json import (
    format_from_json as format_from_json,
    format_to_json as format_to_json,
)
from ._layout import (
    encode as encode,
    Layout as Layout,
    round_trip as round_trip,
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
from ._rotated import Rotated as Rotated, unrotated as unrotated
from ._rows import encode_rows as encode_rows
from ._rsr import (
    AbstractRSR as AbstractRSR,
    RSRBinary as RSRBinary,
    RSRTernary as RSRTernary,
)
from ._scale import (
    from_bits as from_bits,
    or_nan as or_nan,
    reciprocal as reciprocal,
    to_bits as to_bits,
)
from ._square4 import Square4 as Square4
from ._ternary import Ternary as Ternary
from ._tiled import AbstractTiled as AbstractTiled
from ._trellis import Trellis as Trellis
from .gguf import (
    AbstractCodebook as AbstractCodebook,
    AbstractGGUF as AbstractGGUF,
    AbstractGGUFBlocks as AbstractGGUFBlocks,
    AbstractGGUFBytes as AbstractGGUFBytes,
    AbstractK as AbstractK,
    IntegerSearch as IntegerSearch,
    IQ1_M as IQ1_M,
    IQ1_S as IQ1_S,
    IQ2_S as IQ2_S,
    IQ2_XS as IQ2_XS,
    IQ2_XXS as IQ2_XXS,
    IQ3_S as IQ3_S,
    IQ3_XXS as IQ3_XXS,
    IQ4_NL as IQ4_NL,
    IQ4_XS as IQ4_XS,
    PointSearch as PointSearch,
    Q1_0 as Q1_0,
    Q2_0 as Q2_0,
    Q2_K as Q2_K,
    Q3_K as Q3_K,
    Q4_0 as Q4_0,
    Q4_1 as Q4_1,
    Q4_K as Q4_K,
    Q5_0 as Q5_0,
    Q5_1 as Q5_1,
    Q5_K as Q5_K,
    Q6_K as Q6_K,
    Q8_0 as Q8_0,
    RangeSearch as RangeSearch,
    TQ1_0 as TQ1_0,
    TQ2_0 as TQ2_0,
)
