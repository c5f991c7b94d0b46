from typing import Any

import numpy as np

from ..._array import QuantizedArray
from ...formats import Stored
from .._containers import dtypes


class Rows:
    """A quantized array as it is stored in files, contracted along its last axis. It
    may have structs instead of numbers.

    **Arguments:**

    - `name`: the name of the array.
    - `q`: the array.
    - `library`: the name of the library in messages.
    - `flat`: whether the array may be contracted along all its axes.

    **Raises:**

    A `ValueError` if it is contracted along another axis.
    """

    def __init__(self, name: str, q: QuantizedArray, library: str, flat: bool = False):
        self.name, self.shape, self.dtype = name, q.shape, q.dtype
        # `Any`, so that each library can read the fields of its own formats.
        self.format: Any = q.format
        self.tail, self._q, self._library = q.layout.tail, q, library
        if q.axis != -1 and not flat:
            raise self.refused(
                "it should be contracted along its last axis, as in `w @ x`; the axis "
                f"is {q.axis}. (For -2, pass `q.mT`.)"
            )

    @property
    def k(self) -> int:
        return self.shape[-1]

    @property
    def groups(self) -> int:
        """The number of blocks in a row."""
        return -(-self.k // (self.format.block_size or max(self.k, 1)))

    @property
    def prefix(self) -> str:
        """The common prefix of the names of its tensors: the name of the array without
        `weight`."""
        found = self.name.removesuffix("weight")
        if found == self.name or found and not found.endswith("."):
            raise self.refused("its name should end with '.weight'")
        return found

    @property
    def all_stored(self) -> Stored:
        """The stored arrays, in rows."""
        return self._q.layout.to_rows(self._q.stored)

    def stored(self, key: str) -> np.ndarray:
        """Returns one of the stored arrays, in rows."""
        return np.asarray(self.all_stored[key])

    def refused(self, why: str) -> ValueError:
        """Returns the error for an array that the library cannot represent."""
        return ValueError(
            f"{self.name!r}, in {self.format}, cannot be written for {self._library}: "
            f"{why}."
        )


def kind_of(name: str, dtype: Any) -> str:
    """Returns the name of an array's dtype in safetensors files."""
    if dtype not in _kinds:
        raise ValueError(f"{name!r} cannot be written: it is of {dtype}.")
    return _kinds[dtype]


_kinds = {dtype: kind for kind, dtype in dtypes.items()}
