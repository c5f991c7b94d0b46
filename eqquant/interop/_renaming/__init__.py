"""How arrays of a checkpoint become those of a model, in one vocabulary: names
(`_patterns`, `_tables`), and rules that also join, split, stack, transpose and quantize
arrays (`_rules`, `_moved`). Arrays that are not read yet are `_piece`s; `_packed` works
on stored arrays, so that nothing is decoded but what is to be in another format."""

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
