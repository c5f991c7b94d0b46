"""Whether the packages that need PyTorch read what was written here, and the other way
round. Those have environments of their own, so there are four steps:

    python -m tests.interop.by_torch write FOLDER      # with eqquant
    python tests/interop/by_torch.py check FOLDER      # with torch, and the packages
    python tests/interop/by_torch.py make FOLDER       # with torch, and the packages
    python -m tests.interop.by_torch read FOLDER       # with eqquant

The packages are bitsandbytes and compressed-tensors. For GPTQ there is none that runs
everywhere; its steps are in PyTorch, as its kernels have them."""

import json
import pathlib
import sys

import numpy as np


#
# With eqquant
#


def write(folder):
    import jax.numpy as jnp

    import eqquant as eqq
    from eqquant import interop

    half = jnp.float16
    targets = {
        "bitsandbytes": (
            interop.write_bitsandbytes,
            [
                *(eqq.NF4(64), eqq.NF4(128), eqq.formats.BnbFP4(64)),
                eqq.Nested(eqq.NF4(64), scale=eqq.formats.BnbScale(64)),
            ],
        ),
        "compressed-tensors": (
            interop.write_compressed_tensors,
            [
                *(eqq.Int4(32), eqq.Int4(32, False), eqq.Int4(None), eqq.Int8()),
                *(
                    eqq.Int(b, 32, o)
                    for b in (2, 3, 5, 8)
                    for o in (None, "zero_point")
                ),
                *(eqq.FP8("e4m3"), eqq.FP8("e4m3", scale="tensor")),
                *(eqq.NVFP4(inverse=True), eqq.MXFP4()),
            ],
        ),
    }
    for bits in (2, 3, 4, 8):
        formats = [eqq.Int(bits, 32, o, scale_dtype=half) for o in (None, "zero_point")]
        targets[f"gptq{bits}"] = (interop.write_gptq, formats)
    w = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    for name, (write_to, formats) in targets.items():
        each = [eqq.quantize(w, format, axis=-1) for format in formats]
        tensors = {f"{i}.weight": q for i, q in enumerate(each)}
        write_to(folder / "written" / name, tensors)
        dense = {key: np.asarray(q.dequantize()) for key, q in tensors.items()}
        np.savez(folder / "written" / name / "dense.npz", **dense)


def read(folder):
    import jax.numpy as jnp

    import eqquant as eqq
    from eqquant import interop

    for path in sorted((folder / "made").glob("*/")):
        checkpoint = interop.open(path)
        for name, w in np.load(path / "dense.npz").items():
            q = checkpoint[name]
            assert eqq.is_quantized(q), name
            _compare(path.name, name, np.asarray(q.astype(jnp.float32).dequantize()), w)


#
# With torch
#


def check(folder):
    from safetensors.torch import load_file

    for path in sorted((folder / "written").glob("*/")):
        tensors = load_file(path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        kind = path.name.rstrip("2348")
        for name, w in np.load(path / "dense.npz").items():
            layer = name.removesuffix(".weight")
            parts = {
                key.removeprefix(f"{layer}."): x
                for key, x in tensors.items()
                if key.startswith(f"{layer}.")
            }
            found = _decoders[kind](parts, config["quantization_config"], layer)
            # Those of 4-bit floating-point numbers are in bfloat16.
            most = 2**-8 if found.itemsize == 2 else 3e-7
            _compare(path.name, name, found.float().numpy(), w, most)


def _bitsandbytes(parts, config, layer):
    from bitsandbytes.functional import dequantize_4bit, QuantState

    packed = parts.pop("weight")
    state = {k.removeprefix("weight."): x for k, x in parts.items()}
    return dequantize_4bit(packed, QuantState.from_dict(state, device="cpu"))


def _compressed_tensors(parts, config, layer):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    (group,) = [g for g in config["config_groups"].values() if layer in g["targets"]]
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    return compressor.decompress(parts, QuantizationScheme(**group))["weight"]


def _gptq(parts, config, layer):
    import torch

    bits, (_, n) = config["bits"], parts["qweight"].shape

    def numbers(words):
        # Along the last axis.
        found = words[..., None] >> torch.arange(32) & 1
        found = found.reshape(*words.shape[:-1], -1, bits)
        return (found << torch.arange(bits)).sum(-1)

    codes = numbers(parts["qweight"].T.contiguous()).T
    zeros, scales = numbers(parts["qzeros"])[:, :n], parts["scales"].float()
    group = parts["g_idx"].long()
    return ((codes - zeros[group]) * scales[group]).T


_decoders = {
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
}


def make(folder):
    import torch

    torch.manual_seed(0)
    _make_bitsandbytes(folder / "made" / "bitsandbytes")
    _make_compressed_tensors(folder / "made" / "compressed-tensors")


def _make_bitsandbytes(path):
    # (On a CPU, it is wrong for rows of a multiple of 16 that are not whole blocks.)
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    tensors, dense = {}, {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for size, shape in ((64, (96, 128)), (128, (64, 256)), (64, (33, 70))):
                name = f"{kind}.{nested}.{size}.{shape[1]}.weight"
                packed, state = quantize_4bit(
                    torch.randn(shape),
                    blocksize=size,
                    quant_type=kind,
                    compress_statistics=nested,
                )
                tensors[name] = packed
                for key, x in state.as_dict(packed=True).items():
                    tensors[f"{name}.{key}"] = x
                dense[name] = dequantize_4bit(packed, state)
    _save(path, tensors, dense, {})


def _make_compressed_tensors(path):
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    tensors, dense, groups = {}, {}, {}
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            for size in (None, 32):
                layer = f"{bits}.{symmetric}.{size}"
                weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
                weights |= {
                    "strategy": "channel" if size is None else "group",
                    "group_size": size,
                }
                scheme = {
                    "targets": [layer],
                    "weights": weights,
                    "format": "pack-quantized",
                }
                groups[f"group_{len(groups)}"] = scheme
                w, number = torch.randn(40, 96), 1 if size is None else 96 // size
                half = 2 ** (bits - 1)
                state = {"weight": w, "weight_scale": torch.rand(40, number) + 0.5}
                if not symmetric:
                    zeros = torch.randint(-half, half, (40, number), dtype=torch.int8)
                    state["weight_zero_point"] = zeros
                compressor = BaseCompressor.get_value_from_registry("pack-quantized")
                scheme = QuantizationScheme(**scheme)
                parts = compressor.compress(state, scheme)
                tensors |= {f"{layer}.{key}": x for key, x in parts.items()}
                found = compressor.decompress(parts, scheme)["weight"]
                dense[f"{layer}.weight"] = found
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    _save(path, tensors, dense, {"quantization_config": quantization})


def _save(path, tensors, dense, config):
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: x.contiguous() for k, x in tensors.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(config))
    np.savez(path / "dense.npz", **{k: x.float().numpy() for k, x in dense.items()})


def _compare(kind, name, found, w, most=3e-7):
    error = np.max(np.abs(found - w)) / np.max(np.abs(w))
    print(f"{kind} {name}: {'the same' if error == 0 else f'up to {error:.1e} off'}")
    assert found.shape == w.shape and error < most


if __name__ == "__main__":
    steps = {"write": write, "check": check, "make": make, "read": read}
    steps[sys.argv[1]](pathlib.Path(sys.argv[2]))
