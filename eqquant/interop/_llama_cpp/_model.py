import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .._checkpoint import Checkpoint
from .._containers import ggml_numbers, ggml_types, Part
from .._layouts import gguf_parts, parts_of_each
from .._renaming import renamed
from ._describe import describe
from ._families import Family


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


# Llama.cpp's numbers for whole files, by the type of most of their weights. (If a type
# has several numbers, this is the one for files with few other types.)
_numbers = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
    "IQ2_XXS": 19,
    "IQ2_XS": 20,
    "IQ3_XXS": 23,
    "IQ1_S": 24,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ2_S": 28,
    "IQ4_XS": 30,
    "IQ1_M": 31,
    "BF16": 32,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4": 38,
    "NVFP4": 39,
    "Q1_0": 40,
    "Q2_0": 41,
}


def file_type(parts: Iterable[Part]) -> dict[str, Any]:
    """Returns the metadata about the types of tensors: the type of most numbers in
    matrices, and the version of quantized types.

    ??? cite "Reference"

        https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    sizes: Counter[str] = Counter()
    for part in parts:
        if len(part.shape) > 1:
            sizes[part.kind] += math.prod(part.shape)
    found: dict[str, Any] = {}
    if sizes:
        (kind, _), *_ = sizes.most_common(1)
        if kind in _numbers:
            found["general.file_type"] = np.uint32(_numbers[kind])
    if any(not ggml_types[ggml_numbers[kind]].is_plain for kind in sizes):
        found["general.quantization_version"] = np.uint32(2)
    return found
