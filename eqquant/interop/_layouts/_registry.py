from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..._array import is_quantized
from ...formats import AbstractFormat
from .._checkpoint import Entry
from .._containers import Part
from ._base import Source
from ._rows import kind_of


Find: TypeAlias = Callable[[Source], Iterator[Entry]]
Parts: TypeAlias = Callable[[str, Any], dict[str, Part]]
Config: TypeAlias = Callable[[dict[str, AbstractFormat]], dict[str, Any]]
# Maps each hint to its type, or to all values that it may have.
Hints: TypeAlias = Mapping[str, type | tuple[Any, ...]]


class LibraryLayout(NamedTuple):
    """How a library lays out arrays in files: the arguments of `register_layout`."""

    find: Find
    parts: Parts | None
    config: Config
    metadata: dict[str, str]
    hints: Hints
    container: str
    section: str


layouts: dict[str, LibraryLayout] = {}


def register_layout(
    name: str,
    find: Find,
    *,
    parts: Parts | None = None,
    config: Config = lambda formats: {},
    metadata: dict[str, str] | None = None,
    hints: Hints | None = None,
    container: str = "safetensors",
    section: str = "quantization_config",
) -> None:
    """Registers a library's layout: [`eqquant.interop.open`][] then finds its quantized
    arrays, and [`eqquant.interop.write`][] writes them.

    !!! Example

        Files with an int8 array `x.int8` and a scale for each row, `x.scale`:

        ```python
        from eqquant.interop import Entry, Part, register_layout, Rows, to_quantized

        def find(source):
            for name, codes in source.tensors.items():
                base = name.removesuffix(".int8")
                scale = source.get(f"{base}.scale", "F32")
                if base == name or codes.kind != "I8" or scale is None:
                    continue

                def to_array(codes=codes, scale=scale):
                    bits = scale.read().view("uint32")[:, None]
                    stored = {"codes": codes.read(), "scale": bits}
                    return to_quantized(stored, Int8(), codes.shape, "float32")

                float32 = np.dtype("float32")
                sources = (codes, scale)
                yield Entry(
                    base, codes.shape, float32, Int8(), "mine", sources, to_array
                )

        def parts(name, x):
            rows = Rows(name, x, "mine")
            scale = Part("F32", rows.shape[:1], lambda: rows.stored("scale"))
            codes = Part("I8", rows.shape, lambda: rows.stored("codes"))
            return {f"{name}.int8": codes, f"{name}.scale": scale}

        register_layout("mine", find, parts=parts)
        ```

    **Arguments:**

    - `name`: the name of the layout, for the argument `layout` of `open` and `write`.
    - `find`: yields an [`eqquant.interop.Entry`][] for each quantized array among the
        tensors of a [`eqquant.interop.Source`][]. Tensors that belong to no entry are
        ordinary arrays.
    - `parts`: returns the tensors of a quantized array, given its name and the array.
        The array may have structs instead of numbers, which only `Part.make` reads.
        Should raise a `ValueError` if the library lacks the format. `None` if the
        layout can only be read.
    - `config`: returns the entries of `config.json`, given the formats of the quantized
        arrays by their names.
    - `metadata`: the metadata of the safetensors files that are written.
    - `hints`: the hints that `open` takes for the layout: by name, the type of each, or
        a tuple of its values. They override the entries of `source.config` with the
        same names.
    - `container`: the kind of file in which to look for the layout.
    - `section`: the entry of `config.json` to pass as `source.config`. (MLX uses
        `"quantization"`.) A section without a `quant_method` may have either name.
        Without a section, `source.config` is the whole `config.json`.

    **Raises:**

    A `ValueError` if there already is a layout of this name.
    """
    if name in layouts:
        raise ValueError(f"`name` should be new. Got {name!r}, which is registered.")
    layouts[name] = LibraryLayout(
        find,
        parts,
        config,
        metadata or {"format": "pt"},
        hints or {},
        container,
        section,
    )


def writers() -> list[str]:
    """Returns the names of the layouts that can be written."""
    return [name for name, layout in layouts.items() if layout.parts is not None]


def parts_of(layout: LibraryLayout, name: str, x: Any) -> dict[str, Part]:
    """Returns the tensors of an array, whether it is quantized or not."""
    if is_quantized(x):
        assert layout.parts is not None
        return layout.parts(name, x)
    return {name: Part(kind_of(name, x.dtype), tuple(x.shape), lambda: np.asarray(x))}


def check_hints(layout: str, hints: Mapping[str, Any], names: list[str]) -> None:
    """Checks hints for some layouts. Raises a `ValueError` if none of them takes a
    hint, or if its value is invalid."""
    known: dict[str, Any] = {}
    for name in names:
        known |= layouts[name].hints
    for key, value in hints.items():
        if key not in known:
            raise ValueError(
                f"`{key}` is not a hint for {layout}. Hints are "
                f"{', '.join(known) or 'not needed'}."
            )
        wanted = known[key]
        if isinstance(wanted, type):
            if type(value) is not wanted:
                raise ValueError(f"`{key}` should be of {wanted}. Got {value!r}.")
        elif value not in wanted:
            text = " or ".join(map(repr, wanted))
            raise ValueError(f"`{key}` should be {text}. Got {value!r}.")
