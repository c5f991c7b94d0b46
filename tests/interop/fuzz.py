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

import jax
import jax.numpy as jnp
import numpy as np

import eqquant as eqq
from eqquant import interop

from . import exl3, files, fuzz_parts, own
from .mutated import mutated


def _mlx():
    rows, scales = np.zeros((4, 8), np.uint32), np.ones((4, 1), np.float32)
    tensors = {"a.weight": rows, "a.scales": scales, "a.biases": scales}
    return tensors, {"quantization": {"bits": 4, "group_size": 64}}, None


def _mx():
    codes, scales = np.zeros((4, 16), np.uint8), np.full((4, 1), 127, np.uint8)
    return {"mx.weight_packed": codes, "mx.weight_scale": scales}, {}, None


def _sharded():
    x = np.ones((4, 6), np.float32)
    return {"a.weight": x, "b.weight": x[:2], "c.bias": x[0]}, {"dtype": "bfloat16"}, 0


def _many(*made):
    # One file for all that is cheap to look for, with a group for each.
    tensors = {k: x for tensors, _, _ in made for k, x in tensors.items()}
    config = made[0][1]
    if config is not None:
        sections = [c["quantization_config"] for _, c, _ in made if c]
        groups = [x for s in sections for x in s["config_groups"].values()]
        named = {f"group_{i}": x for i, x in enumerate(groups)}
        config = {"quantization_config": sections[0] | {"config_groups": named}}
    return tensors, config, None


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
        _mx(),
    ),
    "mlx": _mlx,
    "bitnet": lambda: files.bitnet(n=8, k=10),
    "exl3": lambda: exl3.made(128, 128, 1),
    "mxfp4": lambda: files.mxfp4(2, 4, 32),
    "modelopt": fuzz_parts.layouts["modelopt"],
}
kinds = (*_made, "index", "gguf", "own", "parts", "gguf-parts")

# No file may take longer, in seconds of the processor, or all files more memory.
_longest, _most_memory = 20, 10**9


def write(kind: str, folder: pathlib.Path) -> pathlib.Path:
    """A file of one kind, and what belongs to it."""
    path = folder / "model.safetensors"
    if kind == "own":
        eqq.save(path, own.tree())
        (folder / "config.json").write_text('{"bits": 4}')
    elif kind == "parts":
        for i in (1, 2, 3):
            part = folder / f"model-0000{i}-of-00003.safetensors"
            files.save(part, {f"w{i}": np.ones(i, np.float32)})
        path = folder
    elif kind == "gguf-parts":
        for i in (1, 2, 3):
            split = {"split.no": i - 1, "split.count": 3, "split.tensors.count": 3}
            part = folder / f"model-0000{i}-of-00003.gguf"
            interop.write_gguf(part, {f"w{i}": jnp.ones(i)}, split)
        path = folder
    elif kind == "gguf":
        path = folder / "model.gguf"
        q = eqq.quantize(jnp.ones((4, 64)), eqq.formats.Q8_0(), axis=-1)
        weights = {"blk.0.attn_q.weight": q, "a": jnp.ones(3)}
        metadata = {
            "general.architecture": "granite",
            "granite.attention.head_count": 2,
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


def check(path: pathlib.Path, read: bool) -> bool:
    """Whether a file can be opened. That it then keeps what it promises."""
    try:
        checkpoint = interop.open(path)
    except (ValueError, FileNotFoundError):
        return False
    if checkpoint.kind == "eqquant" and read:
        own.check(path)
    with checkpoint:
        for entry in checkpoint.entries.values() if read else ():
            try:
                x = entry.read()
            except ValueError:
                continue
            dtype = jax.dtypes.canonicalize_dtype(entry.dtype)
            assert (x.shape, x.dtype) == (entry.shape, dtype)
    return True


def run(kind: str, runs: int, seed: int, reads: float = 0.02) -> tuple[int, float]:
    """Opens so many files. How many could be, and what the slowest took in seconds."""
    rng = random.Random(f"{kind}{seed}")
    if kind == "own":
        # Whether a header is right shows when its arrays are used.
        reads = max(reads, 0.2)
    opened, slowest = 0, 0.0
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = pathlib.Path(name)
        path = write(kind, folder)
        originals = {p: p.read_bytes() for p in folder.iterdir()}
        assert check(path, read=True)
        for i in range(runs):
            target = rng.choice(list(originals))
            changed = None
            if kind.endswith("parts") and rng.random() < 0.2:
                target.unlink()
            else:
                changed = mutated(rng, target, originals[target])
                target.write_bytes(changed)
            start = time.process_time()
            try:
                found = check(path, read=rng.random() < reads)
                took = time.process_time() - start
                assert took < _longest, took
                # A part is missed; what lies beside an own file is not needed.
                assert not found or changed is not None
                assert found or kind != "own" or target.suffix != ".json"
            except BaseException:
                print(f"{kind}, seed {seed}, run {i}: {target.name} = {changed!r}")
                raise
            opened, slowest = opened + found, max(slowest, took)
            target.write_bytes(originals[target])
    return opened, slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reads", type=float, default=0.02, help="the part read")
    parser.add_argument("--kind", choices=kinds, action="append")
    args = parser.parse_args()
    for kind in args.kind or kinds:
        run(kind, 100, args.seed, args.reads)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        opened, slowest = run(kind, args.runs, args.seed, args.reads)
        took = time.perf_counter() - start
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(
            f"{kind}: {args.runs} files, of which {opened} could be opened, in "
            f"{took:.0f} s; the slowest took {slowest:.2f} s, and all {more // 1024} "
            "MB more",
            flush=True,
        )
        assert more * 1024 < _most_memory, more


if __name__ == "__main__":
    main()
