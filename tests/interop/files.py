"""Small files as other libraries write them, made with NumPy alone from what is said of
their layouts; and the matrices that they stand for, in float32."""

import json

import ml_dtypes
import numpy as np


_kinds = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


def save(path, tensors, config=None, metadata=None):
    """Writes a file of safetensors, and what tells of it beside."""
    header = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, x in tensors.items():
        start = len(data)
        data += np.ascontiguousarray(x).tobytes()
        header[name] = {
            "dtype": _kinds[x.dtype.name],
            "shape": x.shape,
            "data_offsets": [start, len(data)],
        }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    if config is not None:
        path.with_name("config.json").write_text(json.dumps(config))


def load(path):
    """The tensors of a file of safetensors, and its metadata."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", {})
    dtypes = {
        kind: np.dtype(getattr(ml_dtypes, name, name)) for name, kind in _kinds.items()
    }
    tensors = {}
    for name, about in header.items():
        first, last = (start + i for i in about["data_offsets"])
        x = np.frombuffer(content[first:last], dtypes[about["dtype"]])
        tensors[name] = x.reshape(about["shape"])
    return tensors, metadata


def stream(codes, bits):
    """Codes along the last axis as words of 32 bits, the lowest bits first."""
    bit = (codes[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & 1
    bit = bit.reshape(*codes.shape[:-1], -1)
    missing = -bit.shape[-1] % 32
    bit = np.pad(bit, [(0, 0)] * (bit.ndim - 1) + [(0, missing)])
    bit = bit.reshape(*bit.shape[:-1], -1, 32)
    return (bit << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)


def _scales(rng, shape, dtype):
    # Of few bits, so that a product with a code is exact in float32.
    return rng.uniform(0.01, 1, shape).astype(ml_dtypes.bfloat16).astype(dtype)


def gptq(
    n=64, k=96, bits=4, size=32, *, version=1, ordered=False, symmetric=False, seed=0,
    name="model.layers.0.self_attn.q_proj", dtype=np.float16, with_index=True,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    groups = 1 if size == -1 else -(-k // size)
    codes = rng.integers(0, 2**bits, (k, n))
    low = 1 if version == 1 else 0
    zeros = rng.integers(low, 2**bits, (groups, n))
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    scales = _scales(rng, (groups, n), dtype)
    index = np.arange(k) // (k if size == -1 else size)
    index = rng.permutation(index) if ordered else index
    tensors = {
        f"{name}.qweight": stream(codes.T, bits).T.view(np.int32),
        f"{name}.qzeros": stream(zeros - low, bits).view(np.int32),
        f"{name}.scales": scales,
    }
    if with_index or ordered:
        tensors[f"{name}.g_idx"] = index.astype(np.int32)
    config = {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": size,
            "sym": symmetric,
            "desc_act": ordered,
            "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        }
    }
    w = (codes - zeros[index]).astype(np.float32) * scales.astype(np.float32)[index]
    return tensors, config, {f"{name}.weight": w.T}


def awq(n=64, k=96, size=32, *, dtype=np.float16, seed=0, name="layers.1.mlp.up_proj"):
    rng = np.random.default_rng(seed)
    groups = 1 if size == -1 else k // size
    codes = rng.integers(0, 16, (k, n))
    zeros = rng.integers(0, 16, (groups, n))
    scales = _scales(rng, (groups, n), dtype)

    def words(x):
        x = x.reshape(len(x), n // 8, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return stream(x, 4)[..., 0].view(np.int32)

    tensors = {
        f"{name}.qweight": words(codes),
        f"{name}.qzeros": words(zeros),
        f"{name}.scales": scales,
    }
    index = np.arange(k) // (k // groups)
    w = (codes - zeros[index]).astype(np.float32) * scales.astype(np.float32)[index]
    quantization = {"quant_method": "awq", "bits": 4, "group_size": size}
    quantization |= {"version": "gemm", "zero_point": True}
    config = {"quantization_config": quantization}
    return tensors, config, {f"{name}.weight": w.T}


_nf4 = np.array(
    [-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
     -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0,
     0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
     0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1],
    np.float32,
)  # fmt: skip
_fp4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
_maps = {"nf4": _nf4, "fp4": np.concatenate([_fp4, -_fp4])}


def bitsandbytes(
    shape=(64, 96), size=64, *, kind="nf4", nested=None, dtype="float32", seed=0,
    name="h.0.mlp.up_proj.weight", table=None,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    total = int(np.prod(shape))
    codes = rng.integers(0, 16, total + total % 2).astype(np.uint8)
    number = -(-total // size)
    absmax = rng.uniform(0.1, 1, number).astype(np.float32)
    state = {
        "quant_type": kind,
        "blocksize": size,
        "dtype": dtype,
        "shape": list(shape),
    }
    tensors = {
        name: (codes[::2] << 4 | codes[1::2])[:, None],
        f"{name}.quant_map": _maps[kind],
    }
    if nested is None:
        tensors[f"{name}.absmax"] = absmax
    else:
        if table is None:
            table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        small = rng.integers(0, 256, number).astype(np.uint8)
        outer = rng.uniform(0.1, 1, -(-number // nested)).astype(np.float32)
        tensors[f"{name}.absmax"] = small
        tensors[f"{name}.nested_absmax"] = outer
        tensors[f"{name}.nested_quant_map"] = table
        state |= {
            "nested_blocksize": nested,
            "nested_dtype": "float32",
            "nested_offset": 1.5,
        }
        scaled = table[small] * outer[np.arange(number) // nested]
        absmax = scaled + np.float32(1.5)
    text = json.dumps(state).encode()
    tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8)
    w = _maps[kind][codes[:total]] * absmax[np.arange(total) // size]
    return tensors, None, {name: w.reshape(shape)}


def bitsandbytes8(n=24, k=40, *, seed=0, name="h.0.q"):
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
    scb = rng.uniform(0.1, 1, n).astype(np.float32)
    tensors = {
        f"{name}.weight": codes,
        f"{name}.SCB": scb,
        f"{name}.weight_format": np.zeros((), np.uint8),
    }
    w = codes * (scb * np.float32(1 / 127))[:, None]
    return tensors, None, {f"{name}.weight": w}


def compressed(
    n=40, k=96, bits=4, size=32, *, symmetric=True, dtype=np.float32, ordered=False,
    seed=0, name="model.layers.0.mlp.down_proj",
):  # fmt: skip
    rng = np.random.default_rng(seed)
    groups = 1 if size is None else -(-k // size)
    codes = rng.integers(0, 2**bits, (n, k))
    zeros = rng.integers(0, 2**bits, (n, groups))
    scales = _scales(rng, (n, groups), dtype)
    index = np.arange(k) // (size or k)
    tensors = {
        f"{name}.weight_packed": stream(codes, bits).view(np.int32),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": np.array([n, k], np.int64),
    }
    if symmetric:
        zeros = np.full_like(zeros, 2 ** (bits - 1))
    else:
        packed = stream(zeros.T, bits).T.view(np.int32)
        tensors[f"{name}.weight_zero_point"] = packed
    if ordered:
        index = rng.permutation(index)
        tensors[f"{name}.weight_g_idx"] = index.astype(np.int32)
    weights = {"num_bits": bits, "type": "int", "group_size": size}
    weights |= {"actorder": "group"} if ordered else {}
    config = _compressed_config(weights | {"symmetric": symmetric})
    w = (codes - zeros[:, index]) * scales.astype(np.float32)[:, index]
    return tensors, config, {f"{name}.weight": w.astype(np.float32)}


def compressed8(
    scale_shape, n=40, k=96, *, kind="int", dtype=np.float32, seed=0, name="q"
):
    """Of 8 bits. Scales of each row, of groups, of blocks, or one."""
    rng = np.random.default_rng(seed)
    if kind == "int":
        codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
    else:
        codes = rng.standard_normal((n, k)).astype(ml_dtypes.float8_e4m3fn)
    scales = _scales(rng, scale_shape, dtype)
    rows, groups = (*scale_shape, 1, 1)[:2] if len(scale_shape) == 2 else (1, 1)
    height, width = -(-n // rows), -(-k // groups)
    spread = np.repeat(np.repeat(scales.reshape(rows, groups), height, 0), width, 1)
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scales}
    weights = {"num_bits": 8, "type": kind, "block_structure": [height, width]}
    w = codes.astype(np.float32) * spread[:n, :k].astype(np.float32)
    return tensors, _compressed_config(weights), {f"{name}.weight": w}


def _compressed_config(weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    return {"quantization_config": quantization}


_e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_e2m1 = np.concatenate([_e2m1, -_e2m1])


def nvfp4(n=24, k=64, *, seed=0, name="q"):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales = rng.uniform(1, 400, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    whole = np.array([256], np.float32)
    tensors = {
        f"{name}.weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        f"{name}.weight_scale": scales,
        f"{name}.weight_global_scale": whole,
    }
    spread = np.repeat(scales.astype(np.float32), 16, axis=1)
    return tensors, None, {f"{name}.weight": _e2m1[codes] * spread / whole}


def mxfp4(experts=3, n=24, k=64, *, seed=0, name="layers.0.mlp.experts.up_proj"):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (experts, n, k)).astype(np.uint8)
    exponents = rng.integers(110, 140, (experts, n, k // 32)).astype(np.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    tensors = {
        f"{name}_blocks": packed.reshape(experts, n, k // 32, 16),
        f"{name}_scales": exponents,
    }
    scale = np.exp2(exponents.astype(np.float32) - 127)
    w = _e2m1[codes] * np.repeat(scale, 32, axis=-1)
    return tensors, None, {name: w.swapaxes(1, 2)}


def bitnet(n=24, k=50, *, divides=True, seed=0, name="model.layers.0.mlp.up_proj"):
    rng = np.random.default_rng(seed)
    signs = rng.integers(-1, 2, (n, k))
    codes = (signs + 1).astype(np.uint8).reshape(4, n // 4, k)
    scale = np.array([0.3], np.float32)
    tensors = {
        f"{name}.weight": codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6,
        f"{name}.weight_scale": scale,
    }
    linear = "bitlinear" if divides else "autobitlinear"
    quantization = {"quant_method": "bitnet", "linear_class": linear}
    w = signs / scale if divides else signs * scale
    config = {"quantization_config": quantization}
    return tensors, config, {f"{name}.weight": w.astype(np.float32)}
