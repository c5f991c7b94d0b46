"""Compiles the native kernels for Windows on x86-64, and compares what they compute
with plain sums, on random weights, in Wine:

    python -m tests.native.windows [SEED [CASES]]

This needs Clang, of the package `ziglang`, and Wine: on Debian, the package `wine64`.
"""

import importlib.util
import sys

from . import emulator


compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-windows-gnu"]


def missing() -> str | None:
    """The tools that are not here, if any."""
    if importlib.util.find_spec("ziglang") is None:
        return "needs the package `ziglang`"
    return emulator.missing({"wine": "Debian's wine64"})


def main(seed: str = "0", cases: str = "100") -> int:
    why = missing()
    if why is not None:
        return emulator.refuse(why)
    return emulator.compare("x86_64", compiler, {"wine": ["wine"]}, seed, cases)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
