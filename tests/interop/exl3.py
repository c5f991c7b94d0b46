"""Files as exllamav3 writes them: another decoder, bit by bit and number by number, of
what exllamav3's sources say of their layout, in float64."""

from typing import Any

import numpy as np


multipliers = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def made(
    n=128, k=256, bits: float = 3, code="mul1", *, signs=False, scale=1.0, seed=0,
    name="model.layers.0.mlp.up_proj",
):  # fmt: skip
    """The tensors of a file, its configuration, and the matrix. Any bits are codes.

    - `signs`: as in older files, with signs alone.
    - `scale`: the largest scale of both axes.
    """
    rng = np.random.default_rng(seed)
    trellis = rng.integers(-(2**15), 2**15, (k // 16, n // 16, int(16 * bits)))
    tensors: dict[str, Any] = {f"{name}.trellis": trellis.astype(np.int16)}
    for axis, size in (("u", k), ("v", n)):
        scales = scale * rng.choice([-1, 1], size) * rng.uniform(0.01, 1, size)
        if signs:
            words = rng.integers(-(2**15), 2**15, size // 16).astype(np.int16)
            tensors[f"{name}.s{axis}"] = words
        else:
            tensors[f"{name}.s{axis}h"] = scales.astype(np.float16)
    if code != "3inst":
        marker = np.array(multipliers[code], np.uint32).view(np.int32)
        tensors[f"{name}.{code}"] = marker
    config = {"quantization_config": {"quant_method": "exl3", "bits": bits}}
    return tensors, config, {f"{name}.weight": matrix(tensors, f"{name}.", bits, code)}


def matrix(tensors, prefix, bits, code):
    """The matrix `(n, k)`, in float64."""
    points = inner(tensors[f"{prefix}trellis"], bits, code)
    suh, svh = (
        tensors[f"{prefix}s{axis}h"].astype(np.float64)
        if f"{prefix}s{axis}h" in tensors
        else of_signs(tensors[f"{prefix}s{axis}"])
        for axis in "uv"
    )
    k, n = points.shape
    w = suh[:, None] * (_hadamard(k) @ points) @ _hadamard(n) * svh
    return w.T


def of_signs(words):
    """1 and -1, where bits are set, from the lowest of a word on."""
    return 1.0 - 2.0 * np.array([word >> i & 1 for word in words for i in range(16)])


def inner(trellis, bits, code):
    """The numbers that codes stand for, `(k, n)`."""
    rows, columns, _ = trellis.shape
    found = np.empty((16 * rows, 16 * columns))
    for i in range(rows):
        for j in range(columns):
            tile = found[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
            for e, state in enumerate(states(trellis[i, j], bits)):
                tile[place(e)] = number(state, code)
    return found


def states(words, bits):
    """Of the 256 numbers of a tile: the 16 bits up to the last of each one's own. Words
    of 32 bits follow each other, each from its highest bit on, in a circle."""
    stream = "".join(f"{word:032b}" for word in words.copy().view("<u4").tolist())
    end, found = 0, []
    for e in range(256):
        # With half bits, numbers have one less and one more in turn.
        end += int(bits) + (e % 2 if bits != int(bits) else 0)
        around = stream[-16:] + stream[:end] if end < 16 else stream[:end]
        found.append(int(around[-16:], 2))
    assert end == len(stream)
    return found


def place(e):
    """The row (of inputs) and column of number `e`: as the threads of a tensor core
    hold a tile, eight numbers each."""
    thread, i = divmod(e, 8)
    row = thread % 4 * 2 + [0, 1, 8, 9, 0, 1, 8, 9][i]
    return row, thread // 4 + (8 if i >= 4 else 0)


def number(state, code):
    """The number of a state, which is a float16."""
    if code == "mul1":
        hashed = state * 0x83DCD12D % 2**32
        x = _half(sum(hashed.to_bytes(4, "little")) + 0x6400)
        return float(np.float16(x * _half(0x1EEE) + _half(0xC931)))
    hashed = state * 89226354 + 64248484 if code == "3inst" else state * 0xCBAC1FED
    hashed = hashed % 2**32 & 0x8FFF8FFF ^ 0x3B603B60
    return float(np.float16(_half(hashed % 2**16) + _half(hashed >> 16)))


# The numbers of all bits of float16, in float64.
_half = np.arange(2**16, dtype=np.uint16).view(np.float16).tolist().__getitem__


def _hadamard(size):
    """Of blocks of 128, on the diagonal."""
    i = np.arange(128)
    odd = np.array([[bin(a & b).count("1") % 2 for a in i] for b in i])
    return np.kron(np.eye(size // 128), (1 - 2 * odd) / np.sqrt(128))
