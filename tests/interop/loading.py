"""How fast a GGUF file becomes the arrays of a model, and how much memory that takes:
`python -m tests.interop.loading TYPE GIGABYTES [whole]`, for `Q4_K` for example. With
`whole`, the layers of the model are stacked, and its projections are joined."""

import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np


hidden, wide, few = 2048, 8192, 512
shapes = {
    "attn_q": (hidden, hidden),
    "attn_k": (few, hidden),
    "attn_v": (few, hidden),
    "attn_output": (hidden, hidden),
    "ffn_gate": (wide, hidden),
    "ffn_up": (wide, hidden),
    "ffn_down": (hidden, wide),
}


def write(path, kind, size):
    """Writes layers of random blocks, of so many bytes in all."""
    import gguf

    type = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[type]
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.integers(0, 60, (n, k // block * nbytes), np.uint8)
        for name, (n, k) in shapes.items()
    }
    depth = max(1, round(size / sum(x.nbytes for x in tensors.values())))
    writer = gguf.GGUFWriter(path, "qwen2")
    for i in range(depth):
        for name, x in tensors.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", x, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path, whole):
    import jax
    import jax.numpy as jnp

    from eqquant import interop

    checkpoint = interop.open(path)
    depth = 1 + max(int(name.split(".")[1]) for name in checkpoint)
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    model, rename = {}, None
    if whole:
        model = {
            "qkv": struct(depth, hidden + 2 * few, hidden),
            "output": struct(depth, hidden, hidden),
            "gate_up": struct(depth, 2 * wide, hidden),
            "down": struct(depth, hidden, wide),
        }
        rename = {
            interop.Join(*(f"blk.{{i}}.attn_{x}.weight" for x in "qkv")): "qkv",
            "blk.{i}.attn_output.weight": "output",
            interop.Join(
                *(f"blk.{{i}}.ffn_{x}.weight" for x in ("gate", "up"))
            ): "gate_up",
            "blk.{i}.ffn_down.weight": "down",
        }
    else:
        for name, entry in checkpoint.entries.items():
            model[name] = struct(*entry.shape)
    # With what is imported and compiled once.
    for name in shapes:
        checkpoint[f"blk.0.{name}.weight"]
    before = _peak()
    start = time.perf_counter()
    loaded = jax.block_until_ready(interop.load_into(model, checkpoint, rename))
    seconds = time.perf_counter() - start
    used = _peak() - before
    packed = sum(q.nbytes for q in loaded.values())
    largest = max(int(np.prod(shape)) for shape in shapes.values()) * 4
    return {
        "seconds": seconds,
        "packed": packed / 1e6,
        "used": used / 1e6,
        "limit": (1.2 * packed + largest) / 1e6,
    }


def read(path):
    """Seconds that it takes to read the file, from the cache of the system."""
    memory = bytearray(2**24)
    start = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(memory):
            pass
    return time.perf_counter() - start


def _peak():
    # In bytes.
    factor = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor


def measured(path, whole):
    """What `load` finds in a process of its own."""
    command = [sys.executable, "-m", "tests.interop.loading", "load", str(path)]
    command += ["whole"] if whole else []
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


if __name__ == "__main__":
    kind, path, *more = sys.argv[1:]
    if kind == "load":
        print(json.dumps(load(path, bool(more))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "model.gguf"
            write(file, kind, float(path) * 1e9)
            for _ in range(3):
                seconds = read(file)
                found = measured(file, bool(more))
                size = file.stat().st_size / 1e6
                print(
                    f"{kind}, {size:.0f} MB: read in {seconds:.2f} s, loaded in "
                    f"{found['seconds']:.2f} s ({size / found['seconds']:.0f} MB/s); "
                    f"{found['packed']:.0f} MB packed, and {found['used']:.0f} MB used "
                    f"at most, of {found['limit']:.0f}"
                )
