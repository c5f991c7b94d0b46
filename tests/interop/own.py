"""Files of `eqquant.save` with every kind of node, and with other headers."""

import json
import pathlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import PartitionSpec as P

import eqquant as eqq

from ..helpers import normal


def tree() -> Any:
    nested = eqq.Nested(eqq.NF4(16), eqq.Int8(16))
    q = eqq.quantize(normal(32, 6), "int8", activation="int8")
    tied = eqq.quantize(normal(4, 20, seed=5), eqq.Int(3, 16, "minimum"), axis=-1)
    return {
        "nf4": eqq.quantize(normal(35, 6, seed=1), eqq.NF4(16)),
        "int8": q.with_sharding(P(None, "a")),
        "int4": eqq.quantize(normal(2, 40, 6), eqq.Int4(16, symmetric=False)),
        "nested": eqq.quantize(normal(48, 5), nested),
        "tied": [tied, tied.T],
        "q4_k": eqq.quantize(normal(2, 256), eqq.formats.Q4_K(), axis=-1),
        "filters": eqq.quantize(normal(4, 3, 2, 5), eqq.Int8(), axis=(-3, -2, -1)),
        "vector": eqq.quantize(normal(19), eqq.NF4(16)),
        "tensor": eqq.quantize(normal(2, 16, 5), eqq.Ternary(scale="tensor")),
        "others": [jnp.arange(3), np.float64(0.5), np.arange(2), 1j, None, True, 2.5],
        "key": jr.key(7),
        "bool": jnp.array([True, False]),
        "pairs": {("a", 0): [[], {}, 3]},
    }


def read_header(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def layout_of(data: bytes) -> dict[str, Any]:
    """The description of the tree in a file."""
    return json.loads(read_header(data)[0]["__metadata__"]["eqquant"])


def with_layout(data: bytes, layout: Any) -> bytes:
    """A file with another description (or text in its place) and its checksum."""
    header, rest = read_header(data)
    text = layout if isinstance(layout, str) else json.dumps(layout)
    checksum = f"{zlib.crc32(text.encode()):08x}"
    header["__metadata__"] = {"eqquant": text, "eqquant.crc32": checksum}
    return with_header(header, rest)


def _leaves(node):
    # (Keys of a dictionary may be of several kinds, which JAX cannot sort.)
    if not isinstance(node, dict | list):
        return [node]
    children = node.values() if isinstance(node, dict) else node
    return [leaf for child in children for leaf in _leaves(child)]


def check(path: pathlib.Path) -> None:
    """What a file loads as can be used."""
    for x in _leaves(eqq.load(path)):
        if eqq.is_quantized(x):
            dense = jax.eval_shape(eqq.dequantize, x)
            assert (dense.shape, dense.dtype) == (x.shape, x.dtype)
            if x.axis == -1:
                left = jax.ShapeDtypeStruct((3, x.shape[-1]), jnp.float32)
                jax.eval_shape(lambda y, x: eqq.qmatmul(y, x.mT), left, x) if (
                    x.ndim == 2
                ) else None
