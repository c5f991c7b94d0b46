import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._checkpoint import Checkpoint
from .._containers import Part
from .._layouts import gguf_parts
from .._rename import renamed
from ._describe import describe
from ._file_type import file_type


_factors = "rope_freqs.weight"
_prefixes = ("model.", "lm_head.")
# Transformers has these in older files, and computes them from the configuration.
_computed = "rotary_emb.inv_freq"


class ModelFile:
    """A GGUF file that llama.cpp loads.

    - `metadata`: all of it.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Checkpoint,
        arrays: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        rename: Any = None,
    ):
        """**Arguments:**

        - `config`: as for `describe`.
        - `arrays`: by their names in Hugging Face or in llama.cpp; without numbers,
            too.
        - `overrides`: metadata that replaces what is found.
        - `rename`: as for [`eqquant.interop.write_gguf`][].

        **Raises:**

        A `ValueError` if something is missing, damaged, or unknown to llama.cpp.
        """
        overrides = {} if overrides is None else dict(overrides)
        self._family, metadata, self._factors, tied = describe(config, overrides)
        self._rename, self._is_tied = rename, tied
        self.metadata = metadata
        self._needed, self._optional = {}, {}
        if self._family is not None:
            self._needed, self._optional = self._family.shapes(metadata)
            if tied is False:
                head = "output.weight"
                self._needed[head] = self._optional.pop(head)
        self._bearer = None
        found = {name: self.parts(name, x) for name, x in arrays.items()}
        written = {key for parts in found.values() for key in parts}
        self._check_complete(written)
        if self._factors is not None and _factors not in written:
            self._bearer = next(name for name, parts in found.items() if parts)
            found[self._bearer] = self.parts(self._bearer, arrays[self._bearer])
        kinds = [part for parts in found.values() for part in parts.values()]
        self.metadata = metadata | file_type(kinds) | overrides

    def parts(self, name: str, x: Any) -> dict[str, Part]:
        """The tensors of an array: none if llama.cpp does not have it.

        **Raises:**

        A `ValueError` if it has no place in the architecture, or the wrong shape.
        """
        found: dict[str, Part] = {}
        for new in renamed(name, self._rename, inverse=True):
            found |= self._parts(new, x)
        if name == self._bearer:
            factors = self._factors
            found[_factors] = Part("F32", factors.shape, lambda: factors)
        return found

    def _parts(self, name, x):
        family = self._family
        if family is None:
            return gguf_parts(name, x, self.metadata)
        if name in self._needed or name in self._optional:
            place, shift = name, False
        else:
            full = name if name.startswith(_prefixes) else f"model.{name}"
            (place,) = renamed(full, family.names) or (None,)
            shift = family.is_shifted and place.endswith("norm.weight")
        if place == "output.weight" and self._is_tied or name.endswith(_computed):
            return {}
        shape = self._needed.get(place, self._optional.get(place))
        if shape is None:
            raise ValueError(
                f"{name!r} has no place in the architecture {family.architecture!r} of "
                "llama.cpp, by its name in Hugging Face or in llama.cpp. `rename` can "
                "change it, or leave it out."
            )
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{name!r} should have the shape {shape}, by the configuration. Got "
                f"{tuple(x.shape)}."
            )
        parts = gguf_parts(place, x, self.metadata)
        return {key: _as_needed(part, shift) for key, part in parts.items()}

    def _check_complete(self, written):
        missing = [name for name in self._needed if name not in written]
        if not missing:
            return
        names = {new: old for old, new in self._family.names.items()}
        tables = {new: old for new, old in names.items() if isinstance(new, str)}
        (old,) = renamed(missing[0], tables)
        more = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(
            f"There should be {missing[0]!r} ({old!r} in Hugging Face){more}, as the "
            "configuration has it."
        )


def _as_needed(part, shift):
    # llama.cpp adds vectors, and multiplies by them, in float32.
    if part.kind != "F64" and (len(part.shape) > 1 or part.kind == "F32" and not shift):
        return part
    one = np.float32(1 if shift else 0)
    return Part("F32", part.shape, lambda: part.make().astype(np.float32) + one)
