"""What the native library knows of GGUF's types."""

import pathlib
import re

import pytest

import eqquant
from eqquant import formats
from eqquant.formats import AbstractCodebook, AbstractGGUFBlocks, AbstractGGUFBytes
from eqquant.kernels.native import _library as library, packings
from eqquant.kernels.native._weight import has_fours, is_far_apart


types = [
    x
    for x in vars(formats).values()
    if isinstance(x, type)
    and issubclass(x, AbstractGGUFBytes)
    and not x.__name__.startswith("Abstract")
]
over = pytest.mark.parametrize("type", types)


def test_the_library_has_the_fields_of_the_formats():
    message = "Run `python -m eqquant.kernels.native.packings`, and build it again."
    assert packings.path.read_text() == packings.text(), message


@pytest.mark.skipif(library.missing() is not None, reason="no native library")
@over
def test_the_library_knows_each_type(type):
    assert library.knows(f"packing.{type.__name__}")


# A type is stated in its own file. Kernels read its fields.
def test_no_kernel_names_a_type():
    names = [x.__name__ for x in types if not issubclass(x, AbstractCodebook)]
    pattern = re.compile(rf"(?<![a-z0-9])k?({'|'.join(names)})(?![A-Za-z0-9_])")
    folder = pathlib.Path(eqquant.__file__).parent / "kernels"
    found = [
        path.name
        for path in folder.rglob("*")
        if path.suffix in (".py", ".h", ".cpp", ".inc") and path != packings.path
        if pattern.search(path.read_text())
    ]
    assert found == []


# Four codes of a row are a lane if they are the same bits of four bytes.
@pytest.mark.skipif(
    library.missing() is not None or not library.has("int8_few_rows"),
    reason="needs products of 8-bit integers",
)
@over
def test_which_codes_are_brought_together(type):
    format = type()
    alike = isinstance(format, AbstractGGUFBlocks) and all(
        [field[1:] for field in code] == [field[1:] for field in format.fields.codes[0]]
        for code in format.fields.codes[:4]
    )
    assert has_fours(format, 512) == alike


def test_codes_whose_bits_are_far_apart():
    assert [x.__name__ for x in types if is_far_apart(x())] == ["Q6_K"]
