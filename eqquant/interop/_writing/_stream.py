import numpy as np


def repacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes as a stream of bits along the last axis, the lowest first, that ends with a
    whole word of 32."""
    found = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    found = found.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    missing = -found.shape[-1] % 32
    found = np.pad(found, [(0, 0)] * (found.ndim - 1) + [(0, missing)])
    return as_words(np.packbits(found, axis=-1, bitorder="little"))


def as_words(stream: np.ndarray) -> np.ndarray:
    """Bytes along the last axis, that end with a whole word, as words."""
    missing = -stream.shape[-1] % 4
    if missing:
        stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, missing)])
    return np.ascontiguousarray(stream).view(np.int32)
