"""The native kernels for Windows, in Wine."""

import subprocess
import sys

import pytest

from . import windows


@pytest.mark.processes
@pytest.mark.skipif(windows.missing() is not None, reason=f"this {windows.missing()}")
def test_kernels():
    command = [sys.executable, "-m", "tests.native.windows", "0", "30"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wine: seed 0, 30 cases" in done.stdout
    assert "avx2: done" in done.stdout, done.stdout
