"""Derives from the bit fields of a GGUF type how the sources read its blocks."""

import functools as ft
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ....formats import AbstractGGUFBlocks, BitField, Code
from ...cpu._codes import integer_step
from .._words import points_of
from ._kind import Kind, rounding_error, source_of_table


# The numbers of a row that tensor cores multiply at once, four in each lane.
_product = 16
# The order in which a lane decodes the bytes of a word, two to a register.
_order = (0, 2, 1, 3)


@ft.cache
def kind_of_blocks(format: AbstractGGUFBlocks) -> Kind | None:
    """Returns how to read the blocks of a type, or `None` if the sources cannot."""
    base, fields, size = format.base, format.fields, format.type_size
    part = base.block_size
    codes = None if part is None else _table(format, part) or _codes(format, part)
    steps, lows = _fours(fields.steps), _fours(fields.lows)
    if part is None or codes is None or steps is None or lows is None:
        return None
    words = {format.scale_at: 2 * format.halves}
    # (A word that begins with them may also have other bits.)
    words |= {piece.byte: 4 for four in (*steps, *lows) for piece in four}
    header, loads = _header(words, size)
    if math.gcd(size, *header) % 2 != 0:
        return None
    constants = dict(
        size=size,
        numbers=format.block_size,
        parts=format.block_size // part,
        zero=codes.zero,
        # (Signed integers become unsigned if their highest bit is flipped.)
        zero_step=128 if fields.signed else fields.zero,
        header_words=len(header),
        code_words=codes.words,
        has_minima=int(format.halves == 2),
        has_steps=int(bool(steps)),
    )
    flip = " ^ 0x80808080u" if fields.signed else ""
    lines = [
        *(
            f"static constexpr int {name} = {value};"
            for name, value in constants.items()
        ),
        "ON_LANE static void load(",
        "    Word* header, Word* codes, const unsigned char* from, int quarter) {",
        *(f"  {line}" for line in (*loads, *codes.loads)),
        "}",
        "ON_LANE static Word halves(const Word* header) {",
        f"  return header[{header[format.scale_at]}];",
        "}",
        *_switch("steps(const Word* header, int i)", _words(steps, header, flip)),
        *_switch("lows(const Word* header, int i)", _words(lows, header)),
        f"using Codes = {codes.decoder};",
        *_switch("code(const Word* codes, int i, int j, Word others)", codes.texts),
    ]
    return Kind(
        weight="Blocks<Type>",
        source=codes.source + "\n  ".join(["struct Type {", *lines]) + "\n};\n",
        operands=("blocks",),
        step_bytes=size,
        step_columns=format.block_size,
        load_bytes=1,
        order=codes.order,
        adds_inputs=format.halves == 2,
        error=codes.error,
    )


class _Codes(NamedTuple):
    # - `words`: the number of words that a lane loads.
    # - `loads`: statements that load them.
    # - `order`: the numbers of a block in the order in which lanes multiply them.
    # - `texts`: the codes of each product, as expressions. Empty if there is a table.
    # - `zero`: what is subtracted from codes.
    # - `decoder`, `source`: the class that decodes codes, and what it needs.
    # - `error`: the relative error of the numbers of its table.
    words: int
    loads: list[str]
    order: tuple[int, ...]
    texts: Sequence[str] = ()
    zero: int = 0
    decoder: str = "Integral"
    source: str = ""
    error: float = 0.0


def _table(format: AbstractGGUFBlocks, part: int) -> _Codes | None:
    # A byte has codes of two numbers, which are in the same part. Each of four lanes
    # loads a word of each 16 bytes.
    points = points_of(format.base)
    if points is None or points.table is None or part % (2 * _product) != 0:
        return None
    numbers = {code: i for i, code in enumerate(format.fields.codes)}
    at = sorted({piece.byte for code in numbers for piece in code})[::_product]
    nibble = lambda byte, start: numbers.get((BitField(byte, start, 4, 0),), -1)
    order = [
        nibble(byte + 4 * quarter + i, start)
        for quarter in range(4)
        for byte in at
        for i in range(4)
        for start in (0, 4)
    ]
    apart = [a // part != b // part for a, b in zip(order[::2], order[1::2])]
    if -1 in order or any(apart):
        return None
    loads = [
        f"copy<4, {_aligned(4, format.type_size, byte)}>"
        f"(codes + {i}, from + {byte} + 4 * quarter);"
        for i, byte in enumerate(at)
    ]
    table = points.table
    return _Codes(
        words=len(at),
        loads=loads,
        order=tuple(order),
        decoder="Table<Points>",
        source=source_of_table(table),
        error=rounding_error(np.asarray(table, np.float32)),
    )


def _codes(format: AbstractGGUFBlocks, part: int) -> _Codes | None:
    size, step = format.type_size, integer_step(format.base)
    if (
        step is None
        or step[0] != 1
        or not 0 <= -step[1] < 64
        or format.base.levels > 64
    ):
        return None
    # The codes of a run of numbers are bits of consecutive bytes. Each of four lanes
    # loads a word of them, or two if they belong to the same part and are aligned.
    for words in (2, 1):
        run, nbytes = words * _product, 4 * words
        runs = _runs(format.fields.codes, run)
        if runs is None or part % run != 0:
            continue
        at = sorted({piece.byte for run in runs for piece in run})
        if math.gcd(size, *at) % (nbytes if words > 1 else 2) != 0:
            continue
        loads = [
            f"copy<{nbytes}, {_aligned(nbytes, size, byte)}>"
            f"(codes + {words * i}, from + {byte} + {nbytes} * quarter);"
            for i, byte in enumerate(at)
        ]
        texts = [
            _ored(pieces, lambda byte, i=i: f"codes[{words * at.index(byte) + i}]")
            for pieces in runs
            for i in range(words)
        ]
        order = tuple(
            first + nbytes * quarter + 4 * word + i
            for quarter in range(4)
            for first in range(0, format.block_size, run)
            for word in range(words)
            for i in _order
        )
        return _Codes(words * len(at), loads, order, texts, zero=-step[1])
    return None


def _runs(codes: Sequence[Code], number: int) -> list[Code] | None:
    """Returns the bit fields of the first of each `number` codes, if those of the next
    codes are in the next bytes, and otherwise `None`."""
    if len(codes) % number != 0:
        return None
    firsts = codes[::number]
    for i, code in enumerate(codes):
        first = firsts[i // number]
        if code != tuple(f._replace(byte=f.byte + i % number) for f in first):
            return None
    return list(firsts)


class _Piece(NamedTuple):
    # Bits of the word that begins at a byte of the block, and their place in the
    # integers of four parts: they are moved so that `start` comes to `at`.
    byte: int
    start: int
    at: int
    mask: int


def _fours(codes: tuple[Code, ...]) -> list[list[_Piece]] | None:
    """Returns where the integers of each four parts are found."""
    if len(codes) % 4 != 0:
        return None
    if (runs := _runs(codes, 4)) is not None:
        mask = lambda number, at: ((1 << number) - 1 << at) * 0x01010101
        return [
            [
                _Piece(byte, start, at, mask(number, at))
                for byte, start, number, at in run
            ]
            for run in runs
        ]
    return [
        [
            _Piece(
                byte // 4 * 4,
                start + byte % 4 * 8,
                at + 8 * i,
                (1 << number) - 1 << at + 8 * i,
            )
            for i, code in enumerate(codes[first : first + 4])
            for byte, start, number, at in code
        ]
        for first in range(0, len(codes), 4)
    ]


def _aligned(most: int, size: int, byte: int) -> int:
    """Returns the number of bytes, up to 16 and a divisor of `most`, that can be loaded
    at once at a byte of each block."""
    return math.gcd(16, size, byte, most)


def _header(words: Mapping[int, int], size: int) -> tuple[dict[int, int], list[str]]:
    """Returns the index of each word, given the first byte and the number of bytes of
    all, and the statements that load them."""
    indices = {byte: i for i, byte in enumerate(sorted(words))}
    runs: list[tuple[int, int]] = []
    for byte in indices:
        if runs and sum(runs[-1]) == byte and runs[-1][1] % 4 == 0:
            first, nbytes = runs.pop()
            runs.append((first, nbytes + words[byte]))
        else:
            runs.append((byte, words[byte]))
    loads = [
        f"copy<{nbytes}, {_aligned(nbytes, size, byte)}>"
        f"(header + {indices[byte]}, from + {byte});"
        for byte, nbytes in runs
    ]
    return indices, loads


def _ored(pieces, word):
    text = "others"
    for byte, start, number, at in pieces:
        text = f"of_two_bytes<{start}, {number}, {at}>({word(byte)}, j, {text})"
    return text


def _words(fours, header, flip=""):
    for pieces in fours:
        text = "0"
        for byte, start, at, mask in pieces:
            word = f"header[{header[byte]}]"
            text = f"of_word<{start}, {at}, {mask:#x}u>({word}, {text})"
        yield text + flip


def _switch(function: str, texts: Iterable[str]) -> Iterator[str]:
    yield f"ON_LANE static Word {function} {{"
    yield "  switch (i) {"
    yield from (f"    case {i}: return {text};" for i, text in enumerate(texts))
    yield "  }"
    yield "  return 0;"
    yield "}"
