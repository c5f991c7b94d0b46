"""Writes `src/weight/packings.inc`, which describes to the native library how GGUF's
types pack codes, from the fields of these types:

    python -m eqquant.kernels.native.packings
"""

import itertools as it
import pathlib

import numpy as np
from jaxtyping import Int

from ... import formats
from ...formats import AbstractCodebook, AbstractGGUFBlocks, AbstractGGUFBytes
from ..cpu._codes import integer_step
from ..cpu._units import alike


path = pathlib.Path(__file__).parent / "src/weight/packings.inc"


def text() -> str:
    """Returns the contents of the file."""
    types = [x for x in vars(formats).values() if isinstance(x, type)]
    types = [x for x in types if issubclass(x, AbstractGGUFBytes)]
    names = [x.__name__ for x in types if not x.__name__.startswith("Abstract")]
    listed = " ".join(f"f({name})" for name in names)
    structs = "\n".join(_struct(name, getattr(formats, name)()) for name in names)
    return f"""\
// Written by `python -m eqquant.kernels.native.packings`.
// clang-format off
#define EQQUANT_GGUF_TYPES(f) {listed}

namespace eqquant {{
namespace gguf {{

{structs}
}}  // namespace gguf
}}  // namespace eqquant
// clang-format on
"""


def _struct(name: str, format: AbstractGGUFBytes) -> str:
    has_table = integer_step(format.base) is None
    members = {"kBytes": format.type_size, "kBlock": format.base.block_size}
    members |= dict(kTable=has_table and not isinstance(format, AbstractCodebook))
    if isinstance(format, AbstractCodebook):
        points, unit = len(format.codebook.points), format.codebook.unit
        members |= dict(kSlices=8, kCodes=32, kBits=8, kPoints=points)
        arrays = []
    else:
        assert isinstance(format, AbstractGGUFBlocks)
        unit, low = 1.0, format.scale_at + 2 if format.halves == 2 else -1
        members |= dict(kBits=int(format.base.bits), kPoints=0)
        members |= dict(kScale=format.scale_at, kLow=low, kZero=format.fields.zero)
        some, arrays = _codes(format)
        members |= some
        if format.fields.steps:
            arrays.append(_array("Scales kScales", _scales(format), 1))
    numbers = ", ".join(f"{key} = {int(value)}" for key, value in members.items())
    lines = [f"int {numbers}", f"float kUnit = {unit}f", *arrays]
    body = "".join(f"  static constexpr {line};\n" for line in lines)
    return f"struct {name} {{\n{body}}};\n"


def _codes(format: AbstractGGUFBlocks) -> tuple[dict[str, int], list[str]]:
    """Returns the slices of codes, and their places: `kRead` and `kCode`."""
    fields, block = np.array(format.fields.codes), format.base.block_size
    assert block is not None
    parts = len(fields) // block
    for number in [i for i in range(parts, 0, -1) if parts % i == 0]:
        # Each byte belongs to one slice, unless it holds upper bits of codes.
        slices = fields.reshape(number, -1, *fields.shape[1:])
        bytes = [set(some[:, 0, 0].tolist()) for some in slices]
        move = _step(slices)
        if sum(map(len, bytes)) == len(set().union(*bytes)) and move is not None:
            break
    else:
        raise ValueError(f"The codes of {format} are not packed in slices.")
    codes = np.concatenate([slices[0], move[..., :2]], axis=-1)
    times, every, first, step = _loop(codes)
    read, found = [], []
    for code, next in zip(first, step[..., 0]):
        bits = []
        for (byte, start, number, at, slice, up), further in zip(code, next):
            of = (byte, slice, further)
            read += [] if of in read else [of]
            bits.append((read.index(of), start, up, number, at))
        found.append(bits)
    members = dict(kSlices=len(slices), kCodes=len(codes), kTimes=times, kEvery=every)
    return members, [_array("Byte kRead", read, 1), _array("CodeBits kCode", found, 2)]


def _loop(codes: Int[np.ndarray, "c p f"]):
    """Returns the longest loop that reads `times` codes, which are `every` codes apart,
    by the same bits of bytes at even distances; the first of these, and the
    distances."""
    sizes = range(len(codes), 0, -1)
    for times, every in it.product(sizes, range(1, len(codes) + 1)):
        if len(codes) % (times * every) == 0:
            some = codes.reshape(-1, times, every, *codes.shape[1:]).swapaxes(0, 1)
            step = _step(some)
            if step is not None and not np.any(step[..., 1:]):
                shape = (-1, *codes.shape[1:])
                return times, every, some[0].reshape(shape), step.reshape(shape)
    raise AssertionError


def _step(x: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."] | None:
    """Returns the distance between neighbours, if it is even and only in bytes and in
    bits."""
    step = x[-1] - x[-2] if len(x) > 1 else np.zeros_like(x[0])
    even = x[0] + np.multiply.outer(np.arange(len(x)), step)
    return step if np.array_equal(x, even) and not np.any(step[..., 2:4]) else None


def _scales(format: AbstractGGUFBlocks):
    """Returns the places of the scales and minima of small blocks: `kScales`."""
    steps, lows = format.fields.steps, format.fields.lows
    both = [a + b for a, b in it.zip_longest(steps, lows, fillvalue=())]
    for group in alike(both):
        first, second = group[0], group[min(1, len(group) - 1)]

        def bits(codes):
            pairs = zip(codes[first], codes[second])
            found = [(a.byte, b.byte - a.byte, *a[1:]) for a, b in pairs]
            if len(found) > 2:
                raise ValueError(f"Scales of {format} are in more than two bytes.")
            return [*found, *[(0, 0, 0, 0, 0)] * (2 - len(found))]

        every = max(1, second - first)
        yield first, len(group), every, bits(steps), bits(lows or [()] * len(steps))


def _array(name: str, values, rank: int) -> str:
    values, sizes = list(values), ""
    inner = values
    for _ in range(rank):
        sizes, inner = f"{sizes}[{len(inner)}]", inner[0]
    return f"{name}{sizes} = {_braces(values)}"


def _braces(x) -> str:
    if isinstance(x, list | tuple):
        return f"{{{', '.join(map(_braces, x))}}}"
    return str(int(x))


if __name__ == "__main__":
    path.write_text(text(), encoding="utf-8")
