import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from ._vocabulary import byte, control, normal, Token, unknown, unused, user_defined


class SentencePiece(NamedTuple):
    """The content of a `tokenizer.model`.

    - `tokens`: the tokens in order.
    - `space_prefix`: whether a space is prepended to text.
    - `special`: the numbers of special tokens, by their kinds.
    """

    tokens: list[Token]
    space_prefix: bool
    special: dict[str, int]


def read_sentencepiece(data: bytes, what: str) -> SentencePiece:
    """Reads the bytes of a `tokenizer.model`, which `what` names in messages. Raises a
    `ValueError` if it is damaged, or a model that does not merge pairs.

    ??? cite "Reference"

        https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
    """
    try:
        pieces, trainer, normalizer = _model(memoryview(data))
        tokens = [_token(piece) for piece in pieces]
    except (IndexError, struct.error, UnicodeDecodeError, KeyError, TypeError):
        raise ValueError(f"{what} is not a SentencePiece model, or damaged.") from None
    kind = trainer.get(3, 1)
    if kind != 2:
        raise ValueError(
            f"{what} should be a SentencePiece model that merges pairs (BPE), as "
            f"llama.cpp expects for these architectures. Got model type {kind}."
        )
    found = {name: trainer.get(key, i) for name, (key, i) in _special.items()}
    special = {name: i for name, i in found.items() if i in range(len(tokens))}
    return SentencePiece(tokens, bool(normalizer.get(3, True)), special)


# Maps the types of pieces to llama.cpp's types.
_types = {1: normal, 2: unknown, 3: control, 4: user_defined, 5: unused, 6: byte}

# The fields with the numbers of special tokens, and their defaults.
_special = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}


def _model(data):
    pieces, settings = [], {2: {}, 3: {}}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(value)
        elif number in settings:
            settings[number] = dict(_fields(value))
    return pieces, settings[2], settings[3]


def _token(piece):
    values = dict(_fields(piece))
    (score,) = struct.unpack("<f", values.get(2, bytes(4)))
    text = str(values[1], "utf-8")
    return Token(text, score if score == score else 0.0, _types[values.get(3, 1)])


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    # Yields the fields of a protocol buffer message.
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        else:
            size = {1: 8, 5: 4}[wire]
        if position + size > len(data):
            raise IndexError
        yield number, data[position : position + size]
        position += size


def _varint(data, position):
    value = shift = 0
    while True:
        part = data[position]
        value |= (part & 127) << shift
        position, shift = position + 1, shift + 7
        if part < 128:
            return value, position
        if shift > 63:
            raise IndexError
