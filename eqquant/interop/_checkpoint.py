import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from .._array import quantize, QuantizedArray
from .._product import Axis
from ..formats import AbstractFormat
from ._containers import MappedFile, RawTensor
from ._tensors import as_dtype


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of a checkpoint, of which nothing is read yet.

    - `name`: in the checkpoint.
    - `shape`, `dtype`: of the array that it stands for.
    - `format`: that it is stored in. `None` if it is not quantized.
    - `layout`: how it is written: `"gptq"`, for example, or `"dense"`.
    - `sources`: the tensors that it is made of.
    - `axis`: that is contracted, if it is quantized.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    format: AbstractFormat | None
    layout: str
    sources: tuple[RawTensor, ...]
    to_array: Callable[[], Any] = dataclasses.field(repr=False)
    axis: Axis = -1

    @property
    def nbytes(self) -> int:
        """How many bytes it takes in the files."""
        return sum(source.nbytes for source in self.sources)

    def struct(self) -> jax.ShapeDtypeStruct | QuantizedArray:
        """The array, without its numbers."""
        return _struct(self.shape, self.dtype, self.format, self.axis)

    def read(self) -> Shaped[Array, "..."] | QuantizedArray:
        """The array."""
        try:
            x = self.to_array()
            if self.format is None:
                as_dtype(x.dtype.name)
                # Not the memory map itself, which follows its file.
                return jnp.array(x, copy=True)
        except ValueError as e:
            raise ValueError(f"Could not read {self.name!r}: {e}") from e
        found = (x.shape, x.dtype, x.format, x.axis)
        assert found == (self.shape, self.dtype, self.format, self.axis), found
        return x

    def numpy(self) -> Shaped[np.ndarray, "..."]:
        """The array as NumPy's, over a memory map of the file where that is possible.
        Only of one that is not quantized."""
        if self.format is not None:
            raise ValueError(f"{self.name!r} is quantized, in {self.format}.")
        return self.to_array()


@ft.cache
def _struct(shape, dtype, format, axis):
    w = jax.ShapeDtypeStruct(shape, dtype)
    if format is None:
        return w
    return jax.eval_shape(lambda w: quantize(w, format, axis=axis), w)


class Checkpoint(Mapping[str, Any]):
    """The arrays of a file, or of a folder, by their names. Each is read when it is
    asked for: quantized ones as a [`eqquant.QuantizedArray`][] of the same codes, all
    others as ordinary arrays. None is kept.

    The beginning of names, up to a dot, gives all that is below it:
    `checkpoint["model.layers.0"]["mlp.up_proj.weight"]`.

    - `kind`: what it is a file of: `"gguf"`, `"gptq"`, ..., or `"safetensors"` if
        nothing in it is quantized. With `+` between several.
    - `entries`: what is known of each array before it is read.
    - `metadata`: what the file says of itself. Of GGUF, this has the tokenizer.
    - `config`: the `config.json` that lies beside it, as a dictionary.

    Made by [`eqquant.interop.open`][].
    """

    def __init__(
        self,
        entries: dict[str, Entry],
        kind: str,
        metadata: dict[str, Any],
        config: dict[str, Any],
        files: list[MappedFile],
    ):
        self.entries = entries
        self.kind = kind
        self.metadata = metadata
        self.config = config
        self._files = files

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
        return Checkpoint(below, self.kind, self.metadata, self.config, self._files)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def close(self) -> None:
        """Closes the files. What was read stays."""
        for file in self._files:
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Those of a mapping would read all of it.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self):
        nbytes = sum(entry.nbytes for entry in self.entries.values())
        return f"Checkpoint({self.kind}, {len(self)} arrays, {nbytes / 1e6:.3g} MB)"
