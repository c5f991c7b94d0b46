"""Changes small files of every kind at random, and opens what comes of it: as
`python -m tests.interop.fuzz --runs 100000`. A few hundred are part of the tests.

Each has to be refused with a `ValueError`, or to give arrays of the shapes that it
promises; soon, and without much memory."""

import argparse
import json
import os
import pathlib
import random
import resource
import tempfile
import time

import jax.numpy as jnp
import numpy as np

import eqquant as eqq
from eqquant import interop

from . import files


def _mlx():
    rows, scales = np.zeros((4, 8), np.uint32), np.ones((4, 1), np.float32)
    tensors = {"a.weight": rows, "a.scales": scales, "a.biases": scales}
    return tensors, {"quantization": {"bits": 4, "group_size": 64}}, None


def _sharded():
    x = np.ones((4, 6), np.float32)
    return {"a.weight": x, "b.weight": x[:2], "c.bias": x[0]}, {"dtype": "bfloat16"}, 0


def _many(*made):
    # One file for all that is cheap to look for.
    tensors = {k: x for tensors, _, _ in made for k, x in tensors.items()}
    return tensors, made[0][1], None


_made = {
    "safetensors": _sharded,
    "gptq": lambda: files.gptq(n=32, k=64),
    "awq": lambda: files.awq(n=32, k=64),
    "bitsandbytes": lambda: _many(
        files.bitsandbytes((4, 64), nested=256), files.bitsandbytes8(4, 8)
    ),
    "compressed-tensors": lambda: _many(
        files.compressed(n=32, k=64, symmetric=False),
        files.compressed8((4, 2), n=4, k=64),
        files.compressed8((4, 1), n=4, k=32, kind="float", name="f"),
        files.nvfp4(4, 32, name="nv"),
    ),
    "mlx": _mlx,
    "bitnet": lambda: files.bitnet(n=8, k=10),
    "mxfp4": lambda: files.mxfp4(2, 4, 32),
}
kinds = (*_made, "index", "gguf")


def write(kind: str, folder: pathlib.Path) -> pathlib.Path:
    """A file of one kind, and what belongs to it."""
    path = folder / "model.safetensors"
    if kind == "gguf":
        path = folder / "model.gguf"
        q = eqq.quantize(jnp.ones((4, 64)), eqq.formats.Q8_0(), axis=-1)
        weights = {"blk.0.attn_q.weight": q, "a": jnp.ones(3)}
        metadata = {
            "general.architecture": "llama",
            "llama.attention.head_count": 2,
            "tokenizer.ggml.tokens": ["a", "b"],
            "scores": [0.5, 1.0],
            "flag": True,
        }
        interop.write_gguf(path, weights, metadata)
    elif kind == "index":
        shards = {"a.weight": "1.safetensors", "b.weight": "2.safetensors"}
        for name, shard in shards.items():
            files.save(folder / shard, {name: np.ones((2, 3), np.float32)})
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    else:
        tensors, config, _ = _made[kind]()
        files.save(path, tensors, config)
    return path


_values = [
    *(None, True, 0, -1, 1, 7, 1.5, 2**31, 2**62, 10**18, 10**30, "", "x", [], {}),
    *([-1], [0], [1] * 40, [10**18, 10**18], [0, 2**63], {"a": 1}, "F32", "U8", "../x"),
    *("/etc/passwd", "F16", [2**32, 2**32], [[]], float("1e400"), "\udc00", "a.weight"),
]
_numbers = [
    0,
    1,
    2,
    3,
    8,
    9,
    255,
    2**16,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63,
    2**64 - 1,
]


def _changed_json(rng, tree):
    """Another value at one place of a JSON tree."""
    if rng.random() < 0.3 or not isinstance(tree, dict | list) or not tree:
        return rng.choice(_values)
    if isinstance(tree, list):
        i = rng.randrange(len(tree))
        return [*tree[:i], _changed_json(rng, tree[i]), *tree[i + 1 :]]
    key = rng.choice(list(tree))
    tree = dict(tree)
    if rng.random() < 0.1:
        tree[rng.choice([*tree, "__metadata__", "", "a.weight"])] = tree.pop(key)
    elif rng.random() < 0.1:
        del tree[key]
    else:
        tree[key] = _changed_json(rng, tree[key])
    return tree


def _changed_bytes(rng, data):
    data = bytearray(data)
    end = min(len(data), 2**11)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        i = rng.randrange(end)
        what = rng.randrange(6)
        if what == 0:
            data[i] = rng.randrange(256)
        elif what == 1:
            data[i] ^= 1 << rng.randrange(8)
        elif what == 2:
            size = rng.choice([4, 8])
            number = rng.choice(_numbers) % 2 ** (8 * size)
            data[i : i + size] = number.to_bytes(size, "little")
        elif what == 3:
            del data[i : i + rng.randrange(1, 20)]
        elif what == 4:
            data[i:i] = data[i : i + rng.randrange(1, 20)]
        else:
            del data[rng.randrange(len(data)) :]
        end = min(len(data), 2**11)
        if end == 0:
            break
    return bytes(data)


def mutated(rng: random.Random, path: pathlib.Path, data: bytes) -> bytes:
    """Another file, from the bytes of one."""
    if path.suffix == ".json" and rng.random() < 0.7:
        return json.dumps(_changed_json(rng, json.loads(data))).encode()
    if path.suffix == ".safetensors" and rng.random() < 0.6:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for _ in range(rng.choice([1, 1, 2])):
            header = _changed_json(rng, header) if isinstance(header, dict) else header
        header = json.dumps(header).encode()
        return len(header).to_bytes(8, "little") + header + data[8 + size :]
    return _changed_bytes(rng, data)


def check(path: pathlib.Path, read: bool) -> bool:
    """Whether a file can be opened. That it then keeps what it promises."""
    try:
        checkpoint = interop.open(path)
    except (ValueError, FileNotFoundError):
        return False
    with checkpoint:
        for entry in checkpoint.entries.values() if read else ():
            try:
                x = entry.read()
            except ValueError:
                continue
            assert (x.shape, x.dtype) == (entry.shape, entry.dtype)
    return True


def run(kind: str, runs: int, seed: int, reads: float = 0.02) -> tuple[int, float]:
    """Opens so many files. How many could be, and what the slowest took in seconds."""
    rng = random.Random(f"{kind}{seed}")
    opened, slowest = 0, 0.0
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = write(kind, pathlib.Path(folder))
        originals = {p: p.read_bytes() for p in path.parent.iterdir()}
        assert check(path, read=True)
        for i in range(runs):
            target = rng.choice(list(originals))
            changed = mutated(rng, target, originals[target])
            target.write_bytes(changed)
            start = time.perf_counter()
            try:
                opened += check(path, read=rng.random() < reads)
            except BaseException:
                print(f"{kind}, seed {seed}, run {i}: {target.name} = {changed!r}")
                raise
            slowest = max(slowest, time.perf_counter() - start)
            target.write_bytes(originals[target])
    return opened, slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=kinds, action="append")
    args = parser.parse_args()
    for kind in args.kind or kinds:
        run(kind, 100, args.seed)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        opened, slowest = run(kind, args.runs, args.seed)
        took = time.perf_counter() - start
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(
            f"{kind}: {args.runs} files, of which {opened} could be opened, in "
            f"{took:.0f} s; the slowest took {slowest:.2f} s, and all {more // 1024} "
            "MB more",
            flush=True,
        )


if __name__ == "__main__":
    main()
