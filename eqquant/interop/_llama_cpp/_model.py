import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._checkpoint import Checkpoint
from .._containers import Part
from .._layouts import gguf_parts, parts_of_each
from .._renaming import renamed
from ._describe import describe
from ._families import Family
from ._file_type import file_type


_head, _factors = "output.weight", "rope_freqs.weight"
_prefixes = ("model.", "lm_head.")
# Only older files have these; they follow from the configuration.
_computed = "rotary_emb.inv_freq"


class ModelFile:
    """A GGUF file that llama.cpp loads.

    - `metadata`: all metadata of the file.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Checkpoint,
        arrays: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
    ):
        """Describes a file by `describe`, for `arrays` by their names in Hugging Face
        or in llama.cpp. They may be structs without numbers. Raises a `ValueError` if a
        part is missing, damaged, or unknown to llama.cpp."""
        overrides = dict(overrides or {})
        description = describe(config, overrides)
        self._family, self.metadata = description.family, description.metadata
        self._factors = description.factors
        self._is_tied = description.is_tied is True
        self._needed, self._optional = {}, {}
        if self._family is not None:
            self._needed, self._optional = self._family.shapes(self.metadata)
            if description.is_tied is False:
                self._needed[_head] = self._optional.pop(_head)
        # The array whose tensors include the factors.
        self._bearer = None
        found = parts_of_each(self.parts, arrays)
        if self._family is not None:
            self._check_complete(self._family, found)
        if not any(_factors in parts for parts in found.values()):
            self._bearer = next((name for name in found if found[name]), None)
        parts = [part for parts in found.values() for part in parts.values()]
        self.metadata |= file_type(parts) | overrides

    def parts(self, name: str, x: Any) -> dict[str, Part]:
        """Returns the tensors of an array, or none if llama.cpp does not use it. Raises
        a `ValueError` if it has no place in the architecture, or the wrong shape."""
        if self._family is None:
            found = gguf_parts(name, x, self.metadata)
        else:
            found = self._parts(self._family, name, x)
        factors = self._factors
        if name == self._bearer and factors is not None:
            found[_factors] = Part("F32", factors.shape, lambda: factors)
        return found

    def _parts(self, family: Family, name, x):
        place = name
        if name not in self._needed and name not in self._optional:
            full = name if name.startswith(_prefixes) else f"model.{name}"
            (place,) = renamed(full, family.names)
        if name.endswith(_computed) or place == _head and self._is_tied:
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
        return {key: _as_needed(part) for key, part in parts.items()}

    def _check_complete(self, family: Family, found):
        written = {key for parts in found.values() for key in parts}
        missing = [name for name in self._needed if name not in written]
        if missing:
            (old,) = renamed(
                missing[0], {new: old for old, new in family.names.items()}
            )
            more = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise ValueError(
                f"There should be {old!r} ({missing[0]!r} in llama.cpp){more}, by the "
                "configuration."
            )


def _as_needed(part):
    # llama.cpp needs vectors in float32 to add them or to multiply by them.
    if part.kind == "F32" or part.kind != "F64" and len(part.shape) > 1:
        return part
    return Part("F32", part.shape, lambda: part.make().astype(np.float32))
