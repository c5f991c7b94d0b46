import json
import os
import pathlib
import subprocess
import sys

import pytest

from .compile_fused import cases, size


root = pathlib.Path(__file__).parents[2]


def _label(case):
    name, m, first, across = case
    return f"{name}-{m}{'-first' * first}{'-across' * across}"


each = pytest.mark.parametrize("case", [*map(_label, cases)])


@pytest.fixture(scope="module")
def compiled():
    """Everything, compiled once, in a process that knows of CUDA."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.compile_fused"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(map(_label, cases), lines, strict=True))


@each
def test_an_a100_decodes_where_it_adds_up(compiled, case):
    assert compiled[case]["kernel"] == "fused_sums"


# No array of the size of the weight. What is written are sums of parts, of at most
# `2**16` threads for each row (along blocks), inputs and results in float32.
@pytest.mark.parametrize("case, m", [(_label(case), case[1]) for case in cases])
def test_no_copy_of_the_weight(compiled, case, m):
    found = compiled[case]
    decoded = 2 * size * size
    assert found["temporary_bytes"] < decoded / 8
    if "across" not in case:
        sums = 4 * m * (2**16 + 3 * size)
        assert found["temporary_bytes"] <= 1.1 * sums
        assert m > 1 or found["temporary_bytes"] < found["stored_bytes"] / 5


@each
def test_stored_arrays_are_read_once(compiled, case):
    reads = compiled[case]["reads"]
    assert "codes" in "".join(reads) and "scale" in "".join(reads)
    assert set(reads.values()) == {1}
    assert compiled[case]["fusions"] <= 5
