import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..._product import as_tuple
from ...formats import AbstractFormat, BnbFP4, BnbScale, Int8, Nested, NF4, row_blocks
from .._checkpoint import Entry
from .._containers import check_shape, parse, Part, RawTensor, short
from .._tensors import weight_dtypes
from ._base import bits_of, check, Source, to_quantized
from ._registry import register_layout
from ._rows import Rows


_state = "quant_state.bitsandbytes__"
_formats = {"nf4": NF4, "fp4": BnbFP4}
_longest_state = 2**16
_names = {format: name for name, format in _formats.items()}
_sizes = tuple(2**i for i in range(5, 13))
# The state of an array with quantized scales has their mean as text. Its length must be
# known before its digits are.
_longest_offset = 24


def find_bitsandbytes(source: Source) -> Iterator[Entry]:
    """Finds arrays of bitsandbytes: 4-bit arrays with a `quant_state`, whose blocks go
    over the flattened array, and 8-bit arrays with `SCB`, a scale for each row."""
    for name, tensor in source.tensors.items():
        for kind in _formats:
            state = source.get(f"{name}.{_state}{kind}", "U8")
            if state is not None:
                yield _entry4(source, name, tensor, state, kind)
        scb = source.get(f"{name.removesuffix('weight')}SCB", "F32", "F16", "BF16")
        if name.endswith("weight") and tensor.kind == "I8" and scb is not None:
            yield _entry8(source, name, tensor, scb)


def _entry8(source, name, tensor, scb):
    check(
        tensor.ndim == 2 and scb.shape == tensor.shape[:1],
        f"{name!r} should have a scale for each row",
        *(tensor, scb),
    )
    layout = source.get(f"{name}_format", "U8")
    if layout is not None and np.any(layout.read() != 0):
        raise ValueError(
            f"{name!r} should have its rows in order. Got {layout.name!r}."
        )
    format = Int8()
    dtype = source.dtype_or(np.float32)

    def to_array():
        scale = scb.read().astype(np.float32) * np.float32(1 / 127)
        stored = {"codes": tensor.read(), "scale": bits_of(scale)[:, None]}
        return to_quantized(stored, format, tensor.shape, dtype)

    sources = tuple(t for t in (tensor, scb, layout) if t is not None)
    return Entry(name, tensor.shape, dtype, format, "bitsandbytes", sources, to_array)


def _entry4(source, name, tensor, state, kind):
    shape, size, dtype, nested = _read_state(state, kind)
    total = check_shape(name, shape)
    number = -(-total // size)
    absmax = source.need(f"{name}.absmax", name, "F32" if nested is None else "U8")
    quant_map = source.need(f"{name}.quant_map", name, "F32")
    tensors = [tensor, absmax, quant_map, state]
    check(
        tensor.nbytes == -(-total // 2)
        and absmax.shape == (number,)
        and quant_map.shape == (16,),
        f"{name!r} should have {number} scales in 'absmax', 16 numbers in 'quant_map', "
        f"and as many bytes as it takes for shape {shape}",
        *tensors,
    )
    scales, nested_size = absmax, 0
    block, flat = _blocks(shape, size, nested is not None)
    format = _formats[kind](block)
    if nested is not None:
        scales = _Scales(source, name, absmax, nested)
        tensors += [scales.absmax, scales.quant_map]
        # Counted in blocks of `block` numbers.
        nested_size = scales.size * size // (block or size)
        format = Nested(format, BnbScale(nested_size))

    def to_array():
        if not np.array_equal(quant_map.read(), _codebook(kind)):
            raise ValueError(f"{quant_map.name!r} has numbers that are not of {kind}.")
        codes = tensor.read().reshape(-1).view(np.uint8)
        # In files, the first code of a byte is in its high bits.
        codes = codes >> np.uint8(4) | codes << np.uint8(4)
        scale = absmax.read()
        scale = scale if nested is not None else bits_of(scale)
        if not flat:
            *lead, k = shape
            codes = codes.reshape(*lead, k // 2)
            starts = np.arange(0, total, block or k)
            scale = scale[starts // size].reshape(*lead, -1)
        if isinstance(scales, _Scales):
            scale = scales.stored(scale, nested_size)
        stored = {"codes": codes, "scale": scale}
        return to_quantized(stored, format, shape, dtype, flat=flat)

    axis = tuple(range(-len(shape), 0)) if flat and len(shape) > 1 else -1
    sources = tuple(tensors)
    return Entry(name, shape, dtype, format, "bitsandbytes", sources, to_array, axis)


def _blocks(shape, size, is_nested):
    """Returns the block size for which each block of a row lies in one block of the
    flattened array, and whether the array must stay flattened because there is none."""
    *lead, k = shape
    if not lead or math.prod(shape) == 0 or k == 0:
        return size, True
    if is_nested and len(lead) > 1:
        # Blocks of scales span all matrices of a stack.
        return size, True
    common = math.gcd(k, size)
    if common % 16 == 0:
        return common, False
    if common == k and k % 2 == 0 and not is_nested:
        return None, False
    return size, True


class _State(NamedTuple):
    shape: tuple[int, ...]
    size: int
    dtype: np.dtype
    # If the scales are quantized: their block size, and the mean subtracted from them.
    nested: tuple[int, float] | None


def _read_state(tensor: RawTensor, kind: str) -> _State:
    if tensor.nbytes > _longest_state:
        raise ValueError(f"{tensor.name!r} should have {_longest_state} bytes at most.")
    state: dict[str, Any] = parse(tensor.read().tobytes(), repr(tensor.name))
    shape, dtype = state.get("shape"), state.get("dtype")
    size: Any = state.get("blocksize")
    offset: Any = state.get("nested_offset")
    nested_size: Any = state.get("nested_blocksize")
    if not (
        (isinstance(shape, list) and 1 <= len(shape) <= 8)
        and all(type(n) is int and 0 <= n < 2**48 for n in shape)
        and _is_size(size)
        and (isinstance(dtype, str) and dtype in weight_dtypes)
        and state.get("quant_type", kind) == kind
        and (offset is None or _is_number(offset) and _is_size(nested_size))
    ):
        raise ValueError(
            f"{tensor.name!r} should have a shape, a block size, a dtype and the type "
            f"{kind!r}. Got {short(state)}."
        )
    nested = None if offset is None else (nested_size, offset)
    return _State(tuple(shape), size, weight_dtypes[dtype], nested)


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) <= float(np.finfo(np.float32).max)


def _is_size(size: Any) -> bool:
    return type(size) is int and 16 <= size <= 2**16 and size % 16 == 0


class _Scales:
    """Quantized scales, whose mean was subtracted first."""

    def __init__(self, source, name, codes, nested):
        self.size, self.offset = nested
        self.absmax = source.need(f"{name}.nested_absmax", name, "F32")
        self.quant_map = source.need(f"{name}.nested_quant_map", name, "F32")
        number = -(-codes.shape[0] // self.size)
        check(
            self.absmax.shape == (number,) and self.quant_map.shape == (256,),
            f"{name!r} should have {number} scales in 'nested_absmax', and 256 numbers "
            "in 'nested_quant_map'",
            *(codes, self.absmax, self.quant_map),
        )

    def stored(self, codes, size):
        """Returns the stored arrays of `BnbScale(size)`, for codes in rows."""
        absmax = bits_of(self.absmax.read())
        blocks, start = row_blocks(codes.shape, size, len(absmax))
        one = (1,) * (codes.ndim - 1)
        return {
            "codes": codes,
            "scale": np.append(absmax, np.uint32(0))[blocks],
            "start": start,
            "codebook": bits_of(self.quant_map.read()).reshape(*one, 256),
            "offset": bits_of(np.full((*one, 1), self.offset, np.float32)),
        }


def _codebook(kind):
    codes = np.arange(16, dtype=np.uint8)
    return np.asarray(_formats[kind]().to_points(codes), np.float32)


def bitsandbytes_parts(name: str, x: Any) -> dict[str, Part]:
    """Returns the tensors of an array in bitsandbytes. Raises a `ValueError` if
    bitsandbytes has no such format."""
    flat = as_tuple(x.axis) == tuple(range(-x.ndim, 0))
    rows = Rows(name, x, "bitsandbytes", flat)
    nested = rows.format if isinstance(rows.format, Nested) else None
    format: Any = rows.format if nested is None else nested.base
    kind = _names.get(type(format))
    size = format.block_size or rows.k
    sizes = {size} if nested is None else {size, nested.scale.block_size}
    is_known = nested is None or isinstance(nested.scale, BnbScale)
    if kind is None or not sizes <= {*_sizes} or not is_known:
        raise rows.refused(
            "it has `NF4(block_size)`, `BnbFP4(block_size)` and `Nested` of these with "
            "`BnbScale(block_size)`, in blocks of powers of two from 32 to 4096"
        )
    if not flat and rows.k % size != 0:
        raise rows.refused(
            f"its blocks go over the rows, which should have a multiple of {size} "
            f"numbers; the shape is {rows.shape}"
        )
    if nested is not None and not flat and len(rows.shape) > 2:
        raise rows.refused(f"nested scales need a matrix; the shape is {rows.shape}")
    total = math.prod(rows.shape)
    state = {
        "quant_type": kind,
        "blocksize": size,
        "dtype": rows.dtype.name,
        "shape": rows.shape,
    }

    def codes():
        # In files, the first code of a byte is in its high bits.
        found = rows.stored("codes").reshape(-1, 1)
        return found >> np.uint8(4) | found << np.uint8(4)

    def absmax():
        found = np.ascontiguousarray(rows.stored("scale")).reshape(-1)
        return found.view(np.dtype(format.scale_dtype)).astype(np.float32)

    def quant_map():
        # Adding 0 turns -0.0 into 0.0, as in bitsandbytes.
        return np.asarray(format.to_points(np.arange(16, dtype=np.uint8))) + 0

    number = -(-total // size)
    parts = {
        name: Part("U8", (-(-total // 2), 1), codes),
        f"{name}.quant_map": Part("F32", (16,), quant_map),
    }
    key = f"{name}.quant_state.bitsandbytes__{kind}"
    if nested is None:
        parts[f"{name}.absmax"] = Part("F32", (number,), absmax)
        return parts | {key: _text(state)}
    return parts | _nested_parts(rows, nested.scale.block_size, number, key, state)


def _nested_parts(rows, size, number, key, state):
    blocks = -(-number // size)

    def stored(key):
        return np.asarray(rows.all_stored["scale"][key])

    def absmax():
        of_rows = stored("scale")
        index, start = row_blocks(stored("codes").shape, size, blocks)
        found = np.zeros(blocks + 1, np.uint32)
        found[index] = of_rows
        if np.any(found[index] != of_rows) or np.any(stored("start") != start):
            raise rows.refused("it has some of the rows of a matrix, and not all")
        return found[:-1]

    def offset():
        mean = stored("offset").view(np.float32).item()
        return _text(state | {"nested_offset": mean}, length).make()

    state = state | {"nested_blocksize": size, "nested_dtype": "float32"}
    length = len(json.dumps(state | {"nested_offset": 0})) + _longest_offset
    return {
        f"{rows.name}.absmax": Part("U8", (number,), lambda: stored("codes")),
        f"{rows.name}.nested_absmax": Part("F32", (blocks,), absmax),
        f"{rows.name}.nested_quant_map": Part(
            "F32", (256,), lambda: stored("codebook")
        ),
        key: Part("U8", (length,), offset),
    }


def _text(state, length=0):
    text = json.dumps(state).ljust(length).encode()
    return Part("U8", (len(text),), lambda: np.frombuffer(text, np.uint8))


def bitsandbytes_config(formats: dict[str, AbstractFormat]) -> dict[str, Any]:
    """Returns the configuration of a model with these formats."""
    nested = [isinstance(format, Nested) for format in formats.values()]
    bases = [f.base if isinstance(f, Nested) else f for f in formats.values()]
    kinds = sorted({_names[type(base)] for base in bases})
    if not kinds:
        return {}
    return {
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": kinds[0],
            "bnb_4bit_use_double_quant": any(nested),
        }
    }


register_layout(
    "bitsandbytes",
    find_bitsandbytes,
    parts=bitsandbytes_parts,
    config=bitsandbytes_config,
)
