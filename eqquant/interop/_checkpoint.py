import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Shaped

from .._array import quantized, QuantizedArray
from .._product import Axis
from ..formats import AbstractFormat
from ..kernels import empty
from ._containers import MappedFile, RawTensor
from ._tensors import for_jax


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of a checkpoint that is read on request.

    - `name`: its name in the checkpoint.
    - `shape`, `dtype`: the shape and the dtype of the (dequantized) array. (If JAX's
        64-bit types are disabled, 64-bit integers that fit into 32 bits are read as
        such.)
    - `format`: the format of a quantized array. `None` for a dense array.
    - `layout`: the library's layout, such as `"gptq"`, or `"dense"`.
    - `sources`: the tensors in the files that store the array.
    - `to_array`: reads these tensors, as a NumPy array or, if there is a `format`, as
        an [`eqquant.QuantizedArray`][].
    - `axis`: the contracted axis of a quantized array.
    - `write`: writes the stored arrays to given memory, by the native library: a
        dictionary of NumPy arrays like `struct().stored`, whose rows may be parts of
        longer rows. `None` if the native library cannot do that.
    - `why_not`: returns why the array cannot be read, if it is part of a quantized
        array that no layout supports. `None` if it can be read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    format: AbstractFormat | None
    layout: str
    sources: tuple[RawTensor, ...]
    to_array: Callable[[], Any] = dataclasses.field(repr=False)
    axis: Axis = -1
    write: Callable[[dict[str, np.ndarray]], None] | None = dataclasses.field(
        default=None, repr=False
    )
    why_not: Callable[[], str] | None = dataclasses.field(default=None, repr=False)

    @property
    def problem(self) -> str | None:
        """Why the array cannot be read, or `None` if it can."""
        return None if self.why_not is None else self.why_not()

    @property
    def nbytes(self) -> int:
        """The size of the array in the files, in bytes."""
        return sum(source.nbytes for source in self.sources)

    def struct(self) -> jax.ShapeDtypeStruct | QuantizedArray:
        """Returns the array with `jax.ShapeDtypeStruct`s instead of numbers."""
        return struct_of(self.shape, self.dtype, self.format, self.axis)

    def check(self) -> None:
        """**Raises:**

        A `ValueError` if there is a `problem`.
        """
        if self.why_not is not None:
            raise ValueError(f"Could not read {self.name!r}: {self.problem}")

    def read(self) -> Shaped[Array, "..."] | QuantizedArray:
        """Reads the array."""
        self.check()
        try:
            x = self.to_array()
            if self.format is None:
                # Copy it, because the memory map changes with its file.
                return jnp.array(for_jax(x), copy=True)
        except ValueError as e:
            raise ValueError(f"Could not read {self.name!r}: {e}") from e
        found = (x.shape, x.dtype, x.format, x.axis)
        assert found == (self.shape, self.dtype, self.format, self.axis), found
        return x

    def write_to(self, stored: dict[str, np.ndarray]) -> None:
        """Reads the array into given memory, if it has a `write`."""
        assert self.write is not None, self.name
        try:
            self.write(stored)
        except ValueError as e:
            raise ValueError(f"Could not read {self.name!r}: {e}") from e

    def numpy(self) -> Shaped[np.ndarray, "..."]:
        """Reads a dense array as a NumPy array, which is a memory map of the file where
        that is possible."""
        if self.format is not None:
            raise ValueError(f"{self.name!r} is quantized, in {self.format}.")
        self.check()
        return self.to_array()


@ft.cache
def struct_of(
    shape: tuple[int, ...], dtype: Any, format: AbstractFormat | None, axis: Axis
) -> jax.ShapeDtypeStruct | QuantizedArray:
    """Returns an array with `jax.ShapeDtypeStruct`s instead of numbers."""
    w = jax.ShapeDtypeStruct(shape, dtype)
    if format is None:
        return w
    return jax.eval_shape(lambda w: quantized(w, format, _zeros, axis=axis), w)


def _zeros(format, w):
    # `format.encode` is not traced, because some formats can only be read.
    return jtu.tree_map(lambda a: jnp.zeros(a.shape, a.dtype), format.structs(w.shape))


def written(
    struct: Any, write: Callable[[dict[str, np.ndarray]], None]
) -> QuantizedArray:
    """Returns an array whose stored numbers are written by `write`, into new memory."""
    stored = {name: empty(a.shape, a.dtype) for name, a in struct.stored.items()}
    write(stored)
    # (On a CPU, this is the same memory.)
    return dataclasses.replace(struct, stored=jax.device_put(stored))


class Checkpoint(Mapping[str, Any]):
    """The arrays of a file or a folder, by their names. Each is read on access, and not
    cached: quantized arrays as [`eqquant.QuantizedArray`][]s with the same codes,
    others as JAX arrays.

    A prefix of names, up to a dot, gives all arrays below it:
    `checkpoint["model.layers.0"]["mlp.up_proj.weight"]`.

    - `kind`: the layout: `"gguf"`, `"eqquant"`, `"gptq"`, ...; several are joined by
        `+`. `"safetensors"` if no array is quantized.
    - `entries`: the descriptions of the arrays, which do not read them.
    - `metadata`: the metadata of the file. The metadata of GGUF hold the tokenizer,
        also after `convert`; [`eqquant.interop.tokenizer`][] builds it.
    - `config`: the content of the `config.json` next to the file. Raises a `ValueError`
        if that is damaged.
    - `paths`: the paths of its files.

    It is made by [`eqquant.interop.open`][].
    """

    def __init__(
        self,
        entries: dict[str, Entry],
        kind: str,
        metadata: dict[str, Any],
        config: Callable[[], dict[str, Any]],
        files: list[MappedFile],
    ):
        self.entries = entries
        self.kind = kind
        self.metadata = metadata
        self._config = config
        self._files = files

    @property
    def config(self) -> dict[str, Any]:
        return self._config()

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(file.path for file in self._files)

    def __getitem__(self, name: str) -> Any:
        if name in self.entries:
            return self.entries[name].read()
        below = {
            path.removeprefix(f"{name}."): entry
            for path, entry in self.entries.items()
            if path.startswith(f"{name}.")
        }
        if not below:
            raise KeyError(name)
        return Checkpoint(below, self.kind, self.metadata, self._config, self._files)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def close(self) -> None:
        """Closes the files. Arrays that were read stay valid."""
        for file in self._files:
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # `Mapping.__eq__` would compare all arrays.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self):
        nbytes = sum(entry.nbytes for entry in self.entries.values())
        return f"Checkpoint({self.kind}, {len(self)} arrays, {nbytes / 1e6:.3g} MB)"
