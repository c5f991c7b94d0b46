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
# The type of a hint, or all values that it may have.
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
    """Makes a library's layout known: [`eqquant.interop.open`][] then finds its
    quantized arrays, and [`eqquant.interop.write`][] writes such.

    !!! Example

        Files in which an int8 array `x.int8` goes with a scale for each row, `x.scale`:

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

    - `name`: of the layout: the argument `layout` of `open` and `write`.
    - `find`: yields an [`eqquant.interop.Entry`][] for each quantized array among the
        tensors of a [`eqquant.interop.Source`][]. Tensors of no entry are ordinary
        arrays.
    - `parts`: the tensors of a quantized array, given its name and itself. The array
        may have structs instead of numbers; only `Part.make` reads these. A format that
        the library lacks is a `ValueError`. `None` if the layout is only read.
    - `config`: the entries of `config.json`, given the formats of the quantized arrays
        by their names.
    - `metadata`: of the safetensors files that are written.
    - `hints`: those that `open` takes for the layout, by their names: the type of each,
        or a tuple of its values. They override the entries of `source.config` with the
        same names.
    - `container`: the kind of file that the layout is searched in.
    - `section`: the entry of `config.json` that `source.config` has. (That of MLX is
        `"quantization"`.) A section without a `quant_method` may have either name, and
        if there is none, `source.config` has all of `config.json`.

    **Raises:**

    A `ValueError` if there is a layout of this name.
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
    """The names of the layouts that can be written."""
    return [name for name, layout in layouts.items() if layout.parts is not None]


def parts_of(layout: LibraryLayout, name: str, x: Any) -> dict[str, Part]:
    """The tensors of an array, whether it is quantized or not."""
    if is_quantized(x):
        assert layout.parts is not None
        return layout.parts(name, x)
    return {name: Part(kind_of(name, x.dtype), tuple(x.shape), lambda: np.asarray(x))}


def check_hints(layout: str, hints: Mapping[str, Any], names: list[str]) -> None:
    """Checks hints for some layouts.

    **Raises:**

    A `ValueError` if none of them takes a hint, or not with this value.
    """
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
