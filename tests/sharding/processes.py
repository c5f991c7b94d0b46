import contextlib
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time


_root = pathlib.Path(__file__).parents[2]


def start(module, *arguments, devices=8, output=None):
    """A process of its own that runs a module of the tests, with warnings as errors."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=_root,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
    )


def run_together(module, number, *arguments, timeout=120):
    """Runs it in a number of processes that share eight devices. Once one of them fails
    the others are killed."""
    arguments = (free_port(), number, *arguments)
    with contextlib.ExitStack() as stack:
        processes, outputs = [], []
        for i in range(number):
            output = stack.enter_context(tempfile.TemporaryFile())
            process = start(module, i, *arguments, devices=8 // number, output=output)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
            outputs.append(output)
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
        if codes != [0] * number:
            texts = [_end(output) for output in outputs]
            raise AssertionError("\n\n".join([f"They ended with {codes}.", *texts]))


def _end(file):
    file.seek(0)
    return file.read()[-5000:].decode(errors="replace")


def free_port():
    # Not of those that the system itself gives away in the meantime.
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("localhost", port))
            return port
