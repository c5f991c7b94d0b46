from typing import Any

import numpy as np

from ..._array import QuantizedArray
from ...formats import Stored
from .._containers import dtypes


class Rows:
    """A quantized array as files have it: with what is contracted as its last axis. It
    may be without its numbers."""

    def __init__(self, name: str, q: QuantizedArray, library: str, flat: bool = False):
        self.name, self.shape, self.dtype = name, q.shape, q.dtype
        # Each library looks for those that it has.
        self.format: Any = q.format
        self.tail, self._q, self._library = q.layout.tail, q, library
        if q.axis != -1 and not flat:
            raise self.refused(
                "it should be contracted along its last axis, as in `w @ x`; the axis "
                f"is {q.axis}. (Of -2, give `q.mT`.)"
            )

    @property
    def k(self) -> int:
        return self.shape[-1]

    @property
    def groups(self) -> int:
        """How many blocks a row has."""
        return -(-self.k // (self.format.block_size or max(self.k, 1)))

    @property
    def prefix(self) -> str:
        """What the names of all its tensors begin with."""
        found = self.name.removesuffix("weight")
        if found == self.name or found and not found.endswith("."):
            raise self.refused("its name should end with '.weight'")
        return found

    @property
    def all_stored(self) -> Stored:
        """The stored arrays, in rows."""
        return self._q.layout.to_rows(self._q.stored)

    def stored(self, key: str) -> np.ndarray:
        return np.asarray(self.all_stored[key])

    def refused(self, why: str) -> ValueError:
        return ValueError(
            f"{self.name!r}, in {self.format}, cannot be written for {self._library}: "
            f"{why}."
        )


def kind_of(name: str, dtype: Any) -> str:
    """The name of the dtype of an array, in files of safetensors."""
    if dtype not in _kinds:
        raise ValueError(f"{name!r} cannot be written: it is of {dtype}.")
    return _kinds[dtype]


_kinds = {dtype: kind for kind, dtype in dtypes.items()}
