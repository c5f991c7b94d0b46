import json
import os
import pathlib
import subprocess
import sys

import pytest

from .compile_cuda import cases, unpacked


root = pathlib.Path(__file__).parents[2]
case = pytest.mark.parametrize("case", [f"{name}-{m}" for name, m, _, _ in cases])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Everything, compiled once, in a process that knows of CUDA."""
    folder = tmp_path_factory.mktemp("mosaic")
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.compile_cuda", folder],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@case
def test_nothing_is_spilled(compiled, case):
    assert compiled[case]["spilled_bytes"] == 0
    assert not compiled[case]["serialized"]


@case
def test_products_are_those_of_tensor_cores(compiled, case):
    found = compiled[case]
    if case.startswith("int8-int8"):
        assert all(name.endswith("s32.s8.s8") for name in found["wgmma"])
    else:
        assert all(name.endswith("f32.bf16.bf16") for name in found["wgmma"])
        # What is decoded never leaves the registers.
        assert found["operands_in_registers"]
    assert found["wgmma"]


# As runs of memory, tiles would end within the rows that follow.
@case
def test_products_are_stored_in_tiles(compiled, case):
    instructions = compiled[case]["instructions"]
    assert instructions["cp.async.bulk.tensor"] >= 3
    assert instructions["cp.async.bulk.global"] == 0


@pytest.mark.parametrize("name, m, n, k", cases)
def test_no_copy_of_the_weight(compiled, name, m, n, k):
    found = compiled[f"{name}-{m}"]
    # The rows in another order, and the sums of eight parts of the contracted axis; and
    # some of the scales, so that they can be fetched.
    most = 4 * m * k + 9 * 4 * (m + 8) * n
    if name in unpacked:
        # A byte for each code at most, and a scale and a minimum for a block of 16.
        most += n * k * (1 + 2 * 4 / 16)
    assert found["temporary_bytes"] <= most + found["stored_bytes"] / 4
    if n == k == 4096 and m <= 16 and name not in unpacked:
        assert found["temporary_bytes"] < found["stored_bytes"] / 2 + 4 * n


def test_codes_are_looked_up_by_permutations(compiled):
    # A thread has sixteen words in each step. For each, twelve permutations look its
    # eight codes up, and five bring bytes in order.
    assert compiled["nf4-1"]["instructions"]["prmt"] == 16 * 17
    assert compiled["int4-1"]["instructions"]["prmt"] == 0
