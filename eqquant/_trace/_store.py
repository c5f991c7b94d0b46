import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array


# Where values are kept: on their device, in the memory of the host, or in files of a
# temporary folder.
places = ("device", "host", "disk")


class Stored(NamedTuple):
    """An array that is not on a device.

    - `read`: returns its numbers.
    - `sharding`: its sharding on the device.
    """

    read: Callable[[], np.ndarray]
    sharding: Any


class Store:
    """Keeps arrays in one of `places`. Files are deleted with the store and its
    arrays."""

    def __init__(self, place: str):
        self._place = place
        self._folder: Path | None = None
        if place == "disk":
            self._folder = Path(tempfile.mkdtemp(prefix="eqquant-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._number = 0

    def put(self, a: Array) -> Array | Stored:
        """Keeps an array. (Random keys stay on their device.)"""
        if self._place == "device" or jnp.issubdtype(a.dtype, jax.dtypes.extended):
            return a
        values = np.asarray(a)
        sharding = a.sharding if isinstance(a.sharding, NamedSharding) else None
        if self._folder is None:
            return Stored(lambda: values, sharding)
        self._number += 1
        return Stored(_File(self._folder, self._number, values).read, sharding)

    def get(self, kept: Array | Stored) -> Array:
        """Returns an array that was kept."""
        if isinstance(kept, Stored):
            return jax.device_put(kept.read(), kept.sharding)
        return kept


class _File:
    def __init__(self, folder: Path, number: int, values: np.ndarray):
        self._path = folder / f"{number}.bin"
        self._dtype, self._shape = values.dtype, values.shape
        self._path.write_bytes(np.ascontiguousarray(values).tobytes())

    def read(self) -> np.ndarray:
        values = np.frombuffer(self._path.read_bytes(), self._dtype)
        return values.reshape(self._shape)

    def __del__(self):
        self._path.unlink(missing_ok=True)
