"""Measures how fast llama.cpp reads and generates text. Run this file by a Python that
has the package `llama_cpp`, with a JSON object of options; it prints its results as
another. It does not import eqquant, because that Python may have no JAX."""

import importlib
import json
import os
import pathlib
import statistics
import sys
import time

import numpy as np


lib = importlib.import_module("llama_cpp")


def main(path, size, prompts, streams, number, seconds):
    lib.llama_backend_init()
    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, None)
    idle = memory()["resident"]
    settings = lib.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(path.encode(), settings)
    if not model:
        raise ValueError(f"llama.cpp does not load {path!r}.")
    found = {"prefill": {}, "decode": {}, "first": [], "idle": idle}
    vocabulary = size["vocabulary"]
    tokens = lambda n: [i * 7 % vocabulary for i in range(n)]
    for n in prompts:
        context = _context(model, n, 1)

        def read(context=context, n=n):
            lib.llama_memory_clear(lib.llama_get_memory(context), True)
            _decode(context, [(t, i, 0) for i, t in enumerate(tokens(n))], {n - 1})
            return _logits(context, n - 1, vocabulary)

        found["first"].append(read()[:1000].tolist())
        found["prefill"][n] = n / _median(read, seconds)
        lib.llama_free(context)
    length = prompts[0]
    for b in streams:
        context = _context(model, length + number, b)
        for stream in range(b):
            prompt = [(t, i, stream) for i, t in enumerate(tokens(length))]
            _decode(context, prompt, set())

        def generate(context=context, b=b):
            memory = lib.llama_get_memory(context)
            for stream in range(b):
                lib.llama_memory_seq_rm(memory, stream, length, -1)
            now = tokens(b)
            for i in range(number):
                batch = [(t, length + i, stream) for stream, t in enumerate(now)]
                _decode(context, batch, set(range(b)))
                every = [_logits(context, j, vocabulary) for j in range(b)]
                now = [int(np.argmax(logits)) for logits in every]

        generate()
        found["decode"][b] = b * number / _median(generate, seconds)
        lib.llama_free(context)
    return found | memory()


def _context(model, length, streams):
    settings = lib.llama_context_default_params()
    # llama.cpp rounds lengths up to multiples of 256.
    settings.n_ctx = -(-length // 256) * 256 * streams
    settings.n_batch = settings.n_ubatch = 512
    settings.n_seq_max = streams
    is_told = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_told else os.cpu_count() or 1
    settings.n_threads = settings.n_threads_batch = cores
    return lib.llama_init_from_model(model, settings)


def _decode(context, entries, wanted):
    batch = lib.llama_batch_init(len(entries), 0, 1)
    batch.n_tokens = len(entries)
    for i, (token, position, stream) in enumerate(entries):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
        batch.logits[i] = i in wanted
    code = lib.llama_decode(context, batch)
    lib.llama_batch_free(batch)
    if code != 0:
        raise ValueError(f"llama.cpp failed, with {code}.")


def _logits(context, i, size):
    return np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (size,))


def _median(call, seconds):
    times = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memory():
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text("utf-8").splitlines() if status.exists() else []
    values = dict(line.split(":", 1) for line in lines)
    bytes = lambda key: int(values[key].split()[0]) * 1024 if key in values else None
    return {"resident": bytes("VmRSS"), "most": bytes("VmHWM")}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
