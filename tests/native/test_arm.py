"""The native kernels for 64-bit ARM, in an emulator of such processors."""

import subprocess
import sys

import pytest

from . import arm


@pytest.mark.processes
@pytest.mark.skipif(arm.missing() is not None, reason=f"this {arm.missing()}")
def test_kernels():
    command = [sys.executable, "-m", "tests.native.arm", "0", "30"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for processor in arm.processors:
        assert f"{processor}: seed 0, 30 cases" in done.stdout
    assert done.stdout.count("neon: done") == 2, done.stdout
    # Of the other processor, these are not tried.
    assert done.stdout.count("neon_dot: done") == 1, done.stdout
    assert done.stdout.count("neon_i8mm: done") == 1, done.stdout
