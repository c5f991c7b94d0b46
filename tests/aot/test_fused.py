import json
import os
import pathlib
import subprocess
import sys

import pytest

from .compile_fused import cases, many, size


root = pathlib.Path(__file__).parents[2]


def _label(case):
    target, name, m, first, across = case
    return f"{target}-{name}-{m}{'-first' * first}{'-across' * across}"


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=_label)


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
    return dict(zip(cases + many, lines, strict=True))


@each(cases)
def test_few_rows_are_decoded_where_they_are_added_up(compiled, case):
    assert compiled[case]["kernel"] == "fused_sums"


# No array of the size of the weight. What is written are inputs and results in float32,
# and across memory sums of parts: of at most so many threads for each row.
@each(cases)
def test_no_copy_of_the_weight(compiled, case):
    target, _, m, first, across = case
    found = compiled[case]
    assert found["temporary_bytes"] < 2 * size * size / 8
    threads = 2**17 if target in ("b200", "rtx5090") else 2**16
    if not across:
        assert found["temporary_bytes"] <= 1.1 * 4 * m * (threads + 3 * size)
        assert m > 1 or found["temporary_bytes"] < found["stored_bytes"] / 5
    if first == across:
        assert found["temporary_bytes"] <= 1.1 * 4 * m * (2**15 + 3 * size)
        assert m > 1 or found["temporary_bytes"] < found["stored_bytes"] / 20
    elif m == 1:
        assert found["temporary_bytes"] < found["stored_bytes"] * 0.6


@each(cases)
def test_stored_arrays_are_read_once(compiled, case):
    reads = compiled[case]["reads"]
    names = "".join(reads)
    assert "blocks" in names or ("codes" in names and "scale" in names)
    assert set(reads.values()) == {1}
    assert compiled[case]["fusions"] <= 5


@each(many)
def test_many_rows_are_multiplied_part_by_part(compiled, case):
    found, (_, name, m, *_) = compiled[case], case
    assert found["kernel"] == "decoded"
    # Of the decoded weight, a sixteenth and what is computed on the way; and the inputs
    # and the results, in float32. (Nested scales are computed, too.)
    part = 2 * size * size / (7 if name == "bnb-double" else 8)
    assert found["temporary_bytes"] < part + 2 * 4 * m * size
