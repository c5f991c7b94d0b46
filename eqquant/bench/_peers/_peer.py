import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from .._candidate import Candidate
from . import _jax, _onnx, _torch


class Peer(NamedTuple):
    """A product of another library.

    - `name`: the name in tables.
    - `packages`: the packages that it needs.
    - `make`: makes a candidate of a weight.
    """

    name: str
    packages: tuple[str, ...]
    make: Callable[[Float[np.ndarray, "k n"]], Candidate]

    @property
    def missing(self) -> list[str]:
        """The required packages that are not installed."""
        return [p for p in self.packages if importlib.util.find_spec(p) is None]


_all = (
    Peer("eformer Array8B", ("eformer",), _jax.eformer("Array8B")),
    Peer("eformer ArrayNF4", ("eformer",), _jax.eformer("ArrayNF4")),
    Peer("qwix int8", ("qwix",), _jax.qwix("int8")),
    Peer("qwix int8, x int8", ("qwix",), _jax.qwix("int8", rows=True)),
    Peer("qwix nf4, 64", ("qwix",), _jax.qwix("nf4", tile=64)),
    Peer("qwix int4, 64", ("qwix",), _jax.qwix("int4", tile=64)),
    Peer("bitsandbytes nf4", ("torch", "bitsandbytes"), _torch.bitsandbytes),
    Peer(
        "bitsandbytes nf4, bfloat16",
        ("torch", "bitsandbytes"),
        _torch.bitsandbytes_bfloat16,
    ),
    Peer("torch int8, bfloat16", ("torch",), _torch.int8),
    Peer("torch int4, 64, bfloat16", ("torch",), _torch.int4),
    Peer(
        "torchao int8",
        ("torch", "torchao"),
        _torch.torchao("Int8WeightOnlyConfig"),
    ),
    Peer(
        "torchao int8, x int8",
        ("torch", "torchao"),
        _torch.torchao("Int8DynamicActivationInt8WeightConfig"),
    ),
    *[
        Peer(
            f"onnxruntime int{bits}, 64{', x int8' if rows else ''}",
            ("onnx", "onnxruntime"),
            _onnx.onnxruntime(bits, rows),
        )
        for bits in (4, 8)
        for rows in (False, True)
    ],
)


def installed_peers() -> list[Peer]:
    """Returns the products of other libraries whose packages are installed."""
    return [peer for peer in _all if not peer.missing]


def missing_packages() -> list[str]:
    """Returns the packages that the other products need."""
    return sorted({package for peer in _all for package in peer.missing})
