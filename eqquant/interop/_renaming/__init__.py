"""Maps the arrays of a checkpoint to the arrays of a model, by names (`_patterns`,
`_tables`), and by rules that also join, split, stack, transpose and quantize arrays
(`_rules`, `_moved`). `_piece` has arrays that are not read yet. `_packed` works on
stored arrays, so that arrays are decoded only to change their format."""

from ._moved import moved as moved, near as near
from ._piece import evaluated as evaluated, Piece as Piece, sources as sources
from ._renamed import has_table as has_table, renamed as renamed
from ._rules import (
    Join as Join,
    Quantized as Quantized,
    Split as Split,
    Sum as Sum,
    Transposed as Transposed,
)
from ._tables import inverse_tables as inverse_tables
