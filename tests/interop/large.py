"""Writes a float model of any size, of several files, as Hugging Face's transformers
would: `python -m tests.interop.large FOLDER --size 8e9`. Its numbers are those of a
normal distribution, from a pool of which each tensor has its own part."""

import argparse
import json
import math
import pathlib

import ml_dtypes
import numpy as np


_kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_pool = 2**20


def shapes(width, wide, layers, vocabulary):
    """The arrays of a Llama."""
    few = width // 4
    found = {"model.embed_tokens.weight": (vocabulary, width)}
    for i in range(layers):
        layer = {
            "input_layernorm": (width,),
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (few, width),
            "self_attn.v_proj": (few, width),
            "self_attn.o_proj": (width, width),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (wide, width),
            "mlp.up_proj": (wide, width),
            "mlp.down_proj": (width, wide),
        }
        found |= {f"model.layers.{i}.{k}.weight": s for k, s in layer.items()}
    return found | {
        "model.norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
    }


def numbers(name, shape, dtype):
    """The numbers of an array, from its name."""
    seed = np.frombuffer(name.encode(), np.uint8)
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal(_pool, np.float32) / math.sqrt(shape[-1])
    count = math.prod(shape)
    x = np.resize(pool, count).reshape(shape)
    return x.astype(dtype)


def write(folder, width, wide, layers, vocabulary, dtype="float32", files=3):
    """The names of the arrays and their shapes."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    found = shapes(width, wide, layers, vocabulary)
    names = list(found)
    where = {}
    for i in range(files):
        some = names[i * len(names) // files : (i + 1) * len(names) // files]
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        _write(folder / file, {name: found[name] for name in some}, dtype)
        where |= dict.fromkeys(some, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "hidden_size": width, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    return found


def _write(path, shapes, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    header, size = {}, 0
    for name, shape in shapes.items():
        start, size = size, size + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _kinds[dtype.name],
            "shape": shape,
            "data_offsets": [start, size],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(
                numbers(name, shape, dtype).data.cast("B")
                if False
                else numbers(name, shape, dtype).tobytes()
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--size", type=float, default=1e9, help="in bytes")
    parser.add_argument("--dtype", choices=_kinds, default="float32")
    args = parser.parse_args()
    width, wide, vocabulary = 4096, 11008, 32000
    count = lambda n: sum(map(math.prod, shapes(width, wide, n, vocabulary).values()))
    itemsize = np.dtype(getattr(ml_dtypes, args.dtype, args.dtype)).itemsize
    each = count(1) - count(0)
    layers = max(1, round((args.size / itemsize - count(0)) / each))
    files = max(1, round(args.size / 2e9)) + 1
    write(args.folder, width, wide, layers, vocabulary, args.dtype, files)


if __name__ == "__main__":
    main()
