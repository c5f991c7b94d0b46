"""Compiles the native kernels for 64-bit ARM, and compares what they compute with plain
sums, on random weights, in an emulator of such processors: one that has all features
that kernels use, and one that has none of them:

    python -m tests.native.arm [SEED [CASES]]

This needs a cross-compiler and an emulator: on Debian, the packages
`g++-aarch64-linux-gnu` and `qemu-user`.
"""

import sys

from . import emulator


compiler = "aarch64-linux-gnu-g++"
processors = ("max", "cortex-a72")


def missing() -> str | None:
    """The tools that are not here, if any."""
    return emulator.missing(
        {
            compiler: "Debian's g++-aarch64-linux-gnu",
            "qemu-aarch64": "Debian's qemu-user",
        }
    )


def main(seed: str = "0", cases: str = "100") -> int:
    why = missing()
    if why is not None:
        return emulator.refuse(why)
    emulators = {name: ["qemu-aarch64", "-cpu", name] for name in processors}
    return emulator.compare("aarch64", [compiler], emulators, seed, cases)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
