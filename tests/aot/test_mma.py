import json
import os
import pathlib
import subprocess
import sys

import pytest

from .compile_mma import cases, copied, size


root = pathlib.Path(__file__).parents[2]
each = pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))


@pytest.fixture(scope="module")
def compiled():
    """Everything, compiled once, in a process that knows of CUDA."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.compile_mma"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {tuple(line["case"]): line for line in lines}


# One kernel reads the weight, where it is; a fusion brings inputs in order, and another
# rounds results. No other array is written.
@each
def test_the_weight_is_read_where_it_is(compiled, case):
    found, (_, name, m, stack) = compiled[case], case
    # (A product is of up to 64 rows, or 32 if sums of inputs take registers, too.)
    assert found["calls"] == -(-m // (32 if name == "mlx" else 64))
    assert found["fusions"] <= 2
    # Inputs in bfloat16, and results of up to four parts in float32.
    assert found["temporary_bytes"] <= 1.1 * stack * m * size * (2 + 4 * 4)


# A part of the weight at a time, and never all of it.
@pytest.mark.parametrize("case", copied, ids=lambda case: "-".join(map(str, case)))
def test_copies_of_stored_arrays(compiled, case):
    assert compiled[case]["temporary_bytes"] <= 32e6
