import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._array import QuantizedArray
from ...formats import AbstractFormat, Layout
from .._containers import RawTensor


class Source(NamedTuple):
    """The tensors and the configuration of a file, in which a layout finds its arrays.

    - `tensors`: the tensors by their names.
    - `config`: the section of the layout in `config.json`, with the user's hints.
    - `metadata`: the metadata of the file.
    - `hints`: the user's hints.
    - `dtype`: the dtype of the model, if `config.json` has it. Tensors alone may not
        determine it.
    """

    tensors: Mapping[str, RawTensor]
    config: dict[str, Any]
    metadata: dict[str, Any]
    hints: dict[str, Any]
    dtype: np.dtype | None

    def dtype_or(self, default: Any) -> np.dtype:
        """Returns the dtype of the model, or else `default`."""
        return np.dtype(default) if self.dtype is None else self.dtype

    def get(self, name: str, *kinds: str) -> RawTensor | None:
        """Returns the tensor of this name, if there is one and its kind is one of
        `kinds`."""
        tensor = self.tensors.get(name)
        return tensor if tensor is not None and tensor.kind in kinds else None

    def need(self, name: str, owner: str, *kinds: str) -> RawTensor:
        """Like `get`, but raises a `ValueError` about the array `owner` if the tensor
        is missing."""
        tensor = self.get(name, *kinds)
        if tensor is None:
            found = self.tensors.get(name)
            raise ValueError(
                f"{owner!r} should have {name!r}, of {' or '.join(kinds)}. Got "
                f"{'nothing' if found is None else found.kind}."
            )
        return tensor


floats = ("F16", "BF16", "F32")
words = ("I32", "U32")


def to_quantized(
    stored: dict[str, Any],
    format: AbstractFormat,
    shape: tuple[int, ...],
    dtype: Any,
    *,
    transposed: bool = False,
    flat: bool = False,
) -> QuantizedArray:
    """Returns a quantized array with given stored arrays.

    **Arguments:**

    - `stored`: the NumPy arrays that `format` would store, with the axes `*b n _`.
        Scales are the bits of their floats.
    - `format`: the format.
    - `shape`: the shape `*b n k`.
    - `dtype`: the dtype of the dequantized array.
    - `transposed`: whether the result has the shape `*b k n`.
    - `flat`: whether blocks go over all axes, as if the array were a vector.
    """
    axes = tuple(range(-len(shape), 0))
    flat = flat and len(axes) > 1
    rows = (int(np.prod(shape)),) if flat else shape
    _check_stored(stored, format.structs(rows))
    layout = Layout(format).preferred(len(rows))
    stored = layout.from_rows(jtu.tree_map(_on_host, stored))
    return QuantizedArray(
        stored=jtu.tree_map(_copied, stored),
        layout=layout.trimmed(stored, rows[-1]),
        axis=axes if flat else -2 if transposed else -1,
        sharding=None,
        activation=None,
        dtype=jnp.dtype(dtype),
        inner=shape[1:] if flat else (),
    )


def _on_host(x):
    # Views the same memory on a CPU.
    if not isinstance(x, jax.Array):
        return x
    on_cpu = all(device.platform == "cpu" for device in x.devices())
    return np.asarray(x) if on_cpu else x


def _copied(x):
    if isinstance(x, jax.Array):
        return x
    if x.flags.c_contiguous:
        # Copy it, because a memory map changes with its file.
        return jnp.array(x, copy=True)
    # `device_put` transposes on the way, which is faster than a compiled program.
    return jax.device_put(x)


def _check_stored(stored: dict[str, Any], expected: dict[str, Any]) -> None:
    if stored.keys() != expected.keys():
        raise ValueError(f"it should store {list(expected)}. Got {list(stored)}.")
    for name, x in stored.items():
        wanted = expected[name]
        if isinstance(wanted, dict):
            _check_stored(x, wanted)
            continue
        # Zero-points may have 16 bits, too.
        fits = x.dtype == wanted.dtype or name == "zero_point"
        if x.shape != wanted.shape or not fits:
            raise ValueError(
                f"its {name!r} should be of {wanted.dtype}{wanted.shape}. Got "
                f"{x.dtype}{x.shape}."
            )


def bits_of(x: np.ndarray) -> np.ndarray:
    """Returns the bits of floats, as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")


def as_bytes(x: np.ndarray) -> np.ndarray:
    """Returns the bytes of words along the last axis, which are the same stream of
    bits."""
    return np.ascontiguousarray(x).view(np.uint8)


def packed_size(k: int, bits: int) -> int:
    """Returns the number of bytes in a row of codes, in units of whole codes and
    bytes."""
    number = 8 // math.gcd(bits, 8)
    return -(-k // number) * (number * bits // 8)


def resized(x: np.ndarray, size: int) -> np.ndarray:
    """Cuts rows, or pads them with zeros, to `size` bytes."""
    missing = size - x.shape[-1]
    if missing <= 0:
        return x[..., :size]
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def unpack(stream: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the codes in a stream of bits along the last axis, lowest bits first."""
    found = np.unpackbits(as_bytes(stream), axis=-1, bitorder="little")
    found = found[..., : count * bits].reshape(*found.shape[:-1], count, bits)
    return np.packbits(found, axis=-1, bitorder="little")[..., 0]


def repacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack`. Returns a stream of bits, padded to whole 32-bit
    words."""
    found = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    found = found.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    missing = -found.shape[-1] % 32
    found = np.pad(found, [(0, 0)] * (found.ndim - 1) + [(0, missing)])
    return as_words(np.packbits(found, axis=-1, bitorder="little"))


def as_words(stream: np.ndarray) -> np.ndarray:
    """Returns bytes along the last axis as 32-bit words, padded with zeros."""
    missing = -stream.shape[-1] % 4
    if missing:
        stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, missing)])
    return np.ascontiguousarray(stream).view(np.int32)


def check(condition: bool, wanted: str, *tensors: RawTensor | None) -> None:
    """If `condition` is false, raises a `ValueError` with the shapes of tensors."""
    if not condition:
        found = [f"{t.name!r} of {t.kind} {t.shape}" for t in tensors if t is not None]
        raise ValueError(f"{wanted}. Got {', '.join(found)}.")
