import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ...formats import FP8, Int, Int4, Int8, MXFP4, MXFP8, NVFP4
from .._checkpoint import Entry
from .._containers import parse, RawTensor
from .._tensors import weight_dtypes
from ._base import (
    as_bytes,
    bits_of,
    check,
    floats,
    packed_size,
    repacked,
    resized,
    Source,
    to_quantized,
)
from ._groups import group_size, scale_blocks
from ._registry import register_layout


_suffix = "_qdata"


def find_torchao(source: Source) -> Iterator[Entry]:
    """Finds arrays of torchao, in the layout of its `flatten_tensor_state_dict`:
    `_w_qdata`, `_w_scale` and others for `w`, whose class and attributes are JSON in
    the metadata of the file, under its name. Classes that also quantize their inputs
    are read as quantized weights only. Raises a `ValueError` if a class is not known,
    or if its metadata are missing."""
    for name, codes in source.tensors.items():
        prefix, _, last = name.rpartition("._")
        if not last.endswith(_suffix) or not prefix:
            continue
        found = _Found(source, prefix, last.removesuffix(_suffix), codes)
        if f"{found.part}scale" in source.tensors:
            yield found.entry()


class _Found(NamedTuple):
    source: Source
    prefix: str
    field: str
    codes: RawTensor

    @property
    def name(self) -> str:
        return f"{self.prefix}.{self.field}"

    @property
    def part(self) -> str:
        return f"{self.prefix}._{self.field}_"

    def get(self, name: str, *kinds: str) -> RawTensor | None:
        return self.source.get(f"{self.part}{name}", *kinds)

    def need(self, name: str, *kinds: str) -> RawTensor:
        return self.source.need(f"{self.part}{name}", self.name, *kinds)

    def entry(self) -> Entry:
        text = self.source.metadata.get(self.name)
        if not isinstance(text, str):
            raise ValueError(
                f"{self.name!r} is of torchao, as {self.codes.name!r} shows, but the "
                "metadata of the file does not name its class. Save it with the "
                "metadata from torchao's `flatten_tensor_state_dict`."
            )
        about = parse(text.encode(), f"The metadata of {self.name!r}")
        tensors = self.source.tensors
        kind, data = about.get("_type"), about.get("_data")
        read = _readers.get(kind) if isinstance(kind, str) else None
        if read is None or not isinstance(data, dict):
            raise ValueError(
                f"{self.name!r} should be one of torchao's {', '.join(_readers)}. Got "
                f"{str(kind)[:100]!r}: save it dequantized, or in one of these."
            )
        parts = about.get("_tensor_data_names")
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, str) and f"{self.part}{part}" not in tensors:
                raise ValueError(
                    f"{self.name!r} should have {self.part + part!r}, by its metadata."
                )
        if f"{self.part}act_pre_scale" in tensors:
            raise ValueError(
                f"{self.name!r} scales its inputs, by {self.part + 'act_pre_scale'!r}, "
                "which a quantized array does not. Save it without."
            )
        check(self.codes.ndim >= 2, f"{self.name!r} should have two axes", self.codes)
        return read(self, data)

    def named(self, data: dict[str, Any], key: str, what: str = "torch.dtype") -> str:
        """Returns the value of an attribute that torchao writes with its type."""
        found = data.get(key)
        value = found.get("_data") if isinstance(found, dict) else None
        if not isinstance(value, str):
            raise ValueError(
                f"The metadata of {self.name!r} should have a {what} for {key!r}."
            )
        return value

    def dtype(self, data: dict[str, Any], key: str) -> np.dtype:
        name = self.named(data, key)
        if name not in weight_dtypes:
            raise ValueError(
                f"{self.name!r} should be of float32, float16 or bfloat16. Got "
                f"{name[:100]!r}."
            )
        return weight_dtypes[name]

    def made(
        self,
        format: Any,
        shape: tuple[int, ...],
        dtype: np.dtype,
        stored: Callable[[], dict[str, Any]],
        *sources: RawTensor | None,
    ) -> Entry:
        to_array = lambda: to_quantized(stored(), format, shape, dtype)
        given = tuple(t for t in (self.codes, *sources) if t is not None)
        return Entry(self.name, shape, dtype, format, "torchao", given, to_array)


def _int8(found: _Found, data: dict[str, Any]) -> Entry:
    return _integers(found, 8, found.dtype(data, "dtype"))


def _intx(found: _Found, data: dict[str, Any]) -> Entry:
    name = found.named(data, "target_dtype")
    known = [f"int{bits}" for bits in range(1, 9)]
    if name not in known:
        raise ValueError(
            f"{found.name!r} should have integers of 1 to 8 bits. Got {name[:100]!r}."
        )
    return _integers(found, 1 + known.index(name), found.dtype(data, "dtype"))


def _integers(found, bits, dtype):
    codes, scale = found.codes, found.need("scale", *floats)
    zeros = given = found.get("zero_point", "I8")
    check(codes.kind == "I8", f"{found.name!r} should have codes of 8 bits", codes)
    check(
        zeros is None or zeros.shape == scale.shape,
        f"{found.name!r} should have a zero-point for each scale",
        *(scale, zeros),
    )
    blocks = scale_blocks(found.source, found.name, codes, scale)
    if zeros is not None and not np.any(zeros.read()):
        zeros = None
    # One-bit codes are `-1` or `0`, which two bits can store, too.
    width = max(bits, 2)
    if bits == 8 and zeros is None:
        format = Int8(blocks.size, scale.dtype)
    elif bits == 4:
        format = Int4(blocks.size, symmetric=zeros is None, scale_dtype=scale.dtype)
    else:
        offset = None if zeros is None else "zero_point"
        format = Int(width, blocks.size, offset, scale_dtype=scale.dtype)

    def unsigned(tensor):
        x, half = tensor.read(), 2 ** (bits - 1)
        if bits < 8 and np.any((x < -half) | (x >= half)):
            raise ValueError(
                f"{tensor.name!r} should have integers of {bits} bits, from {-half} to "
                f"{half - 1}. Got {x.min()} to {x.max()}."
            )
        return x.view(np.uint8) + np.uint8(2 ** (width - 1))

    def stored():
        scales = blocks.by_row(bits_of(scale.read()), codes.shape)
        if isinstance(format, Int8):
            return {"codes": codes.read(), "scale": scales}
        stream = as_bytes(repacked(unsigned(codes), width))
        size = packed_size(codes.shape[-1], width)
        arrays = {"codes": resized(stream, size), "scale": scales}
        if zeros is not None:
            arrays["zero_point"] = blocks.by_row(unsigned(zeros), codes.shape)
        return arrays

    return found.made(format, codes.shape, dtype, stored, scale, given)


def _int4(found: _Found, data: dict[str, Any]) -> Entry:
    # The values are `(q - 8) * scale + zero`, as in fbgemm's `int4_row_quantize_zp`.
    # Scales are transposed.
    codes = found.codes
    scale, zero = (found.need(part, *floats) for part in ("scale", "zero_point"))
    *lead, n, half = codes.shape
    k, groups = 2 * half, scale.shape[-2] if scale.ndim > 1 else 0
    check(
        codes.kind in ("I8", "U8")
        and scale.shape == zero.shape == (*lead, groups, n)
        and scale.kind == zero.kind,
        f"{found.name!r} should have codes of two in a byte, and scales by groups",
        *(codes, scale, zero),
    )
    size = group_size(found.name, [], k, groups)
    # The minimum, `zero - 8 * scale`, takes more bits than `zero` has, so it is
    # float32.
    format = Int(4, size, "minimum")

    def stored():
        s, z = (a.read().astype(np.float32).swapaxes(-1, -2) for a in (scale, zero))
        return {
            # The sign of a code is its upper bit.
            "codes": codes.read().view(np.uint8) ^ np.uint8(0x88),
            "scale": bits_of(np.ascontiguousarray(s)),
            "minimum": bits_of(np.ascontiguousarray(z - 8 * s)),
        }

    shape, dtype = (*lead, n, k), np.dtype(scale.dtype)
    return found.made(format, shape, dtype, stored, scale, zero)


_float8_dtypes = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}


def _float8(found: _Found, data: dict[str, Any]) -> Entry:
    codes, scale = found.codes, found.need("scale", *floats)
    dtype = found.dtype(data, "dtype")
    source = found.source._replace(
        config={"weight_block_size": data.get("block_size")}, hints={}
    )
    check(
        codes.kind in _float8_dtypes, f"{found.name!r} should have 8-bit floats", codes
    )
    blocks = scale_blocks(source, found.name, codes, scale)
    kind = "tensor" if blocks.height is None else "channel"
    format = FP8(_float8_dtypes[codes.kind], blocks.size, kind, scale.dtype)

    def stored():
        scales = blocks.by_row(bits_of(scale.read()), codes.shape)
        # One scale for a matrix is stored once.
        scales = scales[..., :1, :] if kind == "tensor" else scales
        return {"codes": bits_of(codes.read()), "scale": scales}

    return found.made(format, codes.shape, dtype, stored, scale)


def _mx(found: _Found, data: dict[str, Any]) -> Entry:
    codes, dtype = found.codes, found.dtype(data, "orig_dtype")
    scale = found.need("scale", "F8_E8M0", "U8")
    name = found.named(data, "elem_dtype")
    halves = name == "float4_e2m1fn_x2"
    kinds = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
    check(
        codes.kind == ("U8" if halves else kinds.get(name)),
        f"{found.name!r} should have codes of the dtype {name[:100]!r}",
        codes,
    )
    *lead, width = codes.shape
    shape = (*lead, 2 * width if halves else width)
    format = MXFP4() if halves else MXFP8(_float8_dtypes[codes.kind])
    scales = _scales(found, data, scale, shape, 32)
    stored = lambda: {"codes": bits_of(codes.read()), "scale": bits_of(scales())}
    return found.made(format, shape, dtype, stored, scale)


def _nvfp4(found: _Found, data: dict[str, Any]) -> Entry:
    codes, dtype = found.codes, found.dtype(data, "orig_dtype")
    scale, whole = found.need("scale", "F8_E4M3"), found.get("per_tensor_scale", "F32")
    check(
        codes.kind == "U8" and (whole is None or math.prod(whole.shape) == 1),
        f"{found.name!r} should have codes of two in a byte, and one scale for all",
        *(codes, whole),
    )
    *lead, half = codes.shape
    shape = (*lead, 2 * half)
    scales = _scales(found, data, scale, shape, 16)

    def stored():
        number = np.ones((), np.float32) if whole is None else whole.read()
        number = np.broadcast_to(number.reshape(()), (*lead[:-1], 1, 1))
        return {
            "codes": codes.read(),
            "scale": bits_of(scales()),
            "global_scale": bits_of(number.copy()),
        }

    return found.made(NVFP4(), shape, dtype, stored, scale, whole)


def _scales(found, data, scale, shape, size):
    """Returns a function that reads the scale of each block. Scales may be in the order
    in which tensor cores read them: in tiles of 128 rows and 4 columns, in which rows
    32 apart are neighbours."""
    *lead, k = shape
    rows, columns = math.prod(lead), -(-k // size)
    in_tiles = data.get("is_swizzled_scales") is True
    tiles = -(-rows // 128), -(-columns // 4)
    expected = tiles[0] * tiles[1] * 512 if in_tiles else rows * columns
    check(
        data.get("block_size") == size and math.prod(scale.shape) == expected,
        f"{found.name!r} of shape {shape} should have a scale for each {size} numbers",
        *(found.codes, scale),
    )

    def read():
        x = scale.read()
        if in_tiles:
            x = x.reshape(*tiles, 32, 4, 4).transpose(0, 3, 2, 1, 4)
            x = x.reshape(tiles[0] * 128, tiles[1] * 4)[:rows, :columns]
        return x.reshape(*lead, columns)

    return read


_readers: dict[str, Callable[[_Found, dict[str, Any]], Entry]] = {
    "Int8Tensor": _int8,
    "Int4Tensor": _int4,
    "IntxUnpackedToInt8Tensor": _intx,
    "Float8Tensor": _float8,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}

register_layout("torchao", find_torchao)
