"""Checks the kernels for NVIDIA GPUs on the one of this machine, and then times them
next to bfloat16. Writes a CSV:

    python -m tests.kernels.ptx.on_gpu FILE.csv [SECONDS]

First come products of every kind with 1, 7, 16 and 64 rows, each against float64. A
case that takes more than `SECONDS` (60) is stopped: the process that computes is
replaced by another one, and the next case follows. On a machine without a GPU, it runs
the kernels for CPUs, of small weights.
"""

import contextlib
import csv
import functools as ft
import json
import math
import pathlib
import queue
import subprocess
import sys
import threading


fields = ("stage", "kind", "kernel", "m", "k", "n", "status", "error", "bound")
fields += ("seconds", "bfloat16_seconds", "ratio", "about")
# Rows, and sizes that fill tiles and that do not: few enough for a GPU at hand for a
# quarter of an hour.
to_check = ((1, 1000, 131), (16, 1024, 256), (7, 1000, 131), (64, 1000, 131))
rows_to_time = (1, 4, 16, 64, 256, 1024)
shapes_to_time = ((4096, 14336), (8192, 8192))
most_of_mma = 256


def cases(kinds, timed, on_gpu):
    """What to do, the cheapest and most important first."""
    kernel = "bfloat16_mma" if on_gpu else None
    for m, k, n in to_check:
        for kind in kinds:
            yield dict(stage="check", kind=kind, kernel=kernel, m=m, k=k, n=n)
    shapes = shapes_to_time if on_gpu else ((64, 64),)
    for m in rows_to_time if on_gpu else (1,):
        for k, n in shapes:
            for kind in timed:
                of = dict(stage="time", kind=kind, m=m, k=k, n=n)
                # That of the table, and those that it may replace.
                yield of | dict(kernel=None)
                if on_gpu and m <= most_of_mma:
                    yield of | dict(kernel="bfloat16_mma")
                if on_gpu and m == 1:
                    yield of | dict(kernel="fused_sums")


def compute(case):
    """One case, in the process that computes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import eqquant as eqq

    from ...helpers import error
    from .kinds import kinds

    m, k, n, kernel = (case[name] for name in ("m", "k", "n", "kernel"))
    w = jax.random.normal(jax.random.key(0), (n, k))
    q = eqq.tree_prepack(eqq.quantize(w, kinds[case["kind"]], axis=-1), "gpu").mT
    x = jax.random.normal(jax.random.key(1), (m, k), jnp.bfloat16)
    product = jax.jit(lambda x, q: eqq.qmatmul(x, q, kernel=kernel))
    explained = eqq.explain(x, q)
    found = dict(kernel=kernel or explained.kernel, about=jax.devices()[0].device_kind)
    if case["stage"] == "check":
        y = product(x, q)
        found["error"] = error(y, np.asarray(x, np.float64), q.dequantize())
        # (The bound is that of the kernel, beside rounding to bfloat16.)
        found["bound"] = max(explained.error or 0, 5e-3) + 2.0**-8
        found["status"] = "right" if found["error"] <= found["bound"] else "WRONG"
        return found
    dense = _seconds(jax.jit(lambda x, w: x @ w), x, w.T.astype(jnp.bfloat16))
    seconds = _seconds(product, x, q)
    found |= dict(seconds=seconds, bfloat16_seconds=dense, ratio=dense / seconds)
    return found | dict(status="timed")


def _seconds(product, x, w):
    """The time of one product, of several weights in turn: none comes from a cache."""
    import jax
    import jax.tree_util as jtu
    from jax import lax

    from eqquant.bench._gpu import _measure

    nbytes = sum(a.nbytes for a in jtu.tree_leaves(w))
    on_gpu = jax.default_backend() == "gpu"
    number = 16 * max(1, math.ceil(2**29 / nbytes / 16)) if on_gpu else 2

    @jax.jit
    def products(x, weights):
        found = []
        for w in weights:
            x, y = lax.optimization_barrier((x, product(x, w)))
            found.append(y)
        return found

    copies = [jtu.tree_map(lambda a: a.copy(), w) for _ in range(number)]
    size = min(16, number)
    calls = [
        ft.partial(products, x, copies[i : i + size]) for i in range(0, number, size)
    ]
    return _measure._seconds(calls, turn=0.02, rounds=5) / size


class Worker:
    """A process that computes case after case, and can be stopped."""

    def __init__(self, command):
        self.command, self.process = command, None

    def start(self):
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        lines = self.lines = queue.Queue()
        output = self.process.stdout

        def read():
            for line in output:
                lines.put(line)
            lines.put("")

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        # It has to import and to find the GPU first.
        return self._answer(180)

    def run(self, case, timeout):
        if self.process is None and (found := self.start())["status"] != "ready":
            self.stop()
            return found
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(case), file=self.process.stdin, flush=True)
        found = self._answer(timeout)
        if found["status"] in ("timed out", "ended"):
            self.stop()
        return found

    def _answer(self, timeout):
        try:
            while line := self.lines.get(timeout=timeout):
                if line.startswith("{"):
                    return json.loads(line)
            return dict(status="ended")
        except queue.Empty:
            return dict(status="timed out")

    def stop(self):
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        # (One that waits for a GPU may not end.)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
            self.reader.join()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()


def work():
    """The process that computes: a case in each line that it reads, and its answer in a
    line of JSON."""
    import jax

    jax.devices()
    print(json.dumps(dict(status="ready", about=jax.default_backend())), flush=True)
    for line in sys.stdin:
        try:
            found = compute(json.loads(line))
        except Exception as e:
            found = dict(status="failed", about=f"{type(e).__name__}: {e}"[:500])
        print(json.dumps(found), flush=True)


def main(path: str, seconds: str = "60") -> int:
    from .kinds import kinds, timed

    command = [sys.executable, "-m", "tests.kernels.ptx.on_gpu"]
    worker, statuses = Worker(command), []
    ready = worker.start()
    if ready["status"] != "ready":
        raise RuntimeError(f"The process that computes does not start: {ready}.")
    on_gpu = ready["about"] == "gpu"
    with pathlib.Path(path).open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fields)
        table.writeheader()
        for case in cases(kinds, timed, on_gpu):
            found = case | worker.run(case, float(seconds))
            statuses.append(found["status"])
            table.writerow(found)
            file.flush()
            print(*(f"{found[name]}" for name in fields if name in found), flush=True)
    worker.stop()
    return int(not {"right", "timed"} >= set(statuses))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 1 else work())
