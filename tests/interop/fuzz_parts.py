"""Takes a tensor away from small files of every layout, or gives it another name, and
opens what is left: as `python -m tests.interop.fuzz_parts`.

No part of a quantized array may then be an ordinary array, and what is still quantized
has to have its numbers: also beside a section of another library in `config.json`."""

import argparse
import pathlib
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from eqquant import interop

from . import exl3, files


def _mlx():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (4, 128)).astype(np.uint8)
    scales, biases = rng.uniform(0.1, 1, (2, 4, 2)).astype(np.float32)
    tensors = {
        "a.weight": files.stream(codes, 4),
        "a.scales": scales,
        "a.biases": biases,
    }
    w = codes * scales.repeat(64, 1) + biases.repeat(64, 1)
    return tensors, {"quantization": {"bits": 4, "group_size": 64}}, {"a.weight": w}


def _mlx_mxfp4():
    # The same codes and exponents as those of gpt-oss.
    made, _, expected = files.mxfp4(1, 4, 64, name="a")
    blocks = made["a_blocks"].reshape(4, 32).view(np.uint32)
    tensors = {"a.weight": blocks, "a.scales": made["a_scales"][0]}
    config = {"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}
    return tensors, config, {"a.weight": expected["a"][0].T}


def _modelopt():
    tensors, _, expected = files.nvfp4(name="q")
    whole = np.float32(1) / tensors["q.weight_global_scale"]
    parts = {
        "q.weight": tensors["q.weight_packed"],
        "q.weight_scale": tensors["q.weight_scale"],
        "q.weight_scale_2": whole,
        "q.input_scale": whole,
    }
    return parts, {"quantization_config": {"quant_method": "modelopt"}}, expected


def _float8():
    made, _, expected = files.compressed8((3, 2), kind="float", n=384, k=256)
    inverse = {
        "q.weight": made["q.weight"],
        "q.weight_scale_inv": made["q.weight_scale"],
    }
    return inverse, {"quantization_config": {"quant_method": "fp8"}}, expected


def _bitsandbytes(made):
    tensors, _, expected = made
    return tensors, {"quantization_config": {"quant_method": "bitsandbytes"}}, expected


# Parts without which weights are the same.
_idle = ("input_scale", "weight_format")

layouts = {
    "gptq": lambda: files.gptq(32, 64),
    "gptq-symmetric": lambda: files.gptq(32, 64, symmetric=True, ordered=True),
    "awq": lambda: files.awq(32, 64),
    "bitsandbytes": lambda: _bitsandbytes(files.bitsandbytes((4, 64))),
    "bitsandbytes-nested": lambda: _bitsandbytes(
        files.bitsandbytes((4, 64), nested=256)
    ),
    "bitsandbytes8": lambda: _bitsandbytes(files.bitsandbytes8(4, 32)),
    "compressed-tensors": lambda: files.compressed(32, 64, symmetric=False),
    "compressed-tensors-ordered": lambda: files.compressed(32, 64, ordered=True),
    "compressed-tensors-int8": lambda: files.compressed8((32, 2), 32, 64),
    "compressed-tensors-fp8": lambda: files.compressed8((32, 1), 32, 64, kind="float"),
    "nvfp4": files.nvfp4,
    "modelopt": _modelopt,
    "float8": _float8,
    "mlx": _mlx,
    "mlx-mxfp4": _mlx_mxfp4,
    "mxfp4": lambda: files.mxfp4(2, 4, 32),
    "bitnet": lambda: files.bitnet(8, 10),
    # (Without its marker, a file of whole bits would have another code.)
    "exl3": lambda: exl3.made(128, 128, 2.5, scale=0.05),
}


def changed(tensors: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was done to a file, and the tensors that it then has."""
    for name in tensors:
        rest = {k: x for k, x in tensors.items() if k != name}
        module, _, last = name.rpartition(".")
        prefix = f"{module}." if module else ""
        yield f"without {name!r}", rest
        for new in (f"{name}_x", f"{prefix}old_{last}", f"{prefix}other.{last}"):
            yield f"{name!r} renamed to {new!r}", rest | {new: tensors[name]}


def with_others(config: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Configurations that also have the section of another library."""
    rng = random.Random(seed)
    (own,) = config
    other = {"quantization": "quantization_config"}.get(own, "quantization")
    for _ in range(8):
        section = {
            "bits": rng.choice([2, 3, 4, 8]),
            "group_size": rng.choice([-1, 16, 32, 64, 128]),
            "sym": rng.random() < 0.5,
            "checkpoint_format": rng.choice(["gptq", "gptq_v2"]),
            "mode": rng.choice(["affine", "mxfp8", "nvfp4"]),
        }
        if other == "quantization_config":
            section["quant_method"] = rng.choice(["gptq", "awq", "fp8", "unknown"])
        both = [(own, config[own]), (other, section)]
        yield dict(both if rng.random() < 0.5 else both[::-1])


def check(path: pathlib.Path, layout: str, seed: int = 0) -> tuple[int, int]:
    """Tries all changes of a file. How many were refused, and how many were not."""
    tensors, config, expected = layouts[layout]()
    both = [] if config is None else with_others(config, seed)
    for one in (config, *both):
        files.save(path, tensors, one)
        assert _refused(path, expected, f"with {one}") == 0
    path.with_name("config.json").unlink(missing_ok=True)
    refused = accepted = 0
    for what, rest in changed(tensors):
        files.save(path, rest, config)
        if _refused(path, expected, what):
            refused += 1
        else:
            accepted += 1
    return refused, accepted


def _refused(path, expected, what):
    try:
        checkpoint = interop.open(path)
    except ValueError:
        return 1
    number = 0
    with checkpoint:
        for name, entry in checkpoint.entries.items():
            try:
                x = checkpoint[name]
            except ValueError:
                number += 1
                continue
            if entry.format is None:
                assert any(x in name for x in _idle), f"{what}: {name!r} is ordinary"
                continue
            w = np.asarray(x.astype(np.float32).dequantize())
            (expect,) = expected.values()
            np.testing.assert_allclose(w, expect, rtol=2e-7, atol=1e-7, err_msg=what)
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=layouts, action="append")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for layout in args.layout or layouts:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.safetensors"
            refused, accepted = check(path, layout, args.seed)
        print(f"{layout}: {refused} changes were refused, and {accepted} do not matter")


if __name__ == "__main__":
    main()
