import csv
import json
import os
import pathlib
import subprocess
import sys

import pytest

from .compile_tpu import cases


root = pathlib.Path(__file__).parents[2]

labels = [f"{a} {b} {c} {d}" for a, b, c, d in cases]
all_cases = pytest.mark.parametrize("case", labels)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Everything, compiled once, in a process that knows of TPUs."""
    folder = tmp_path_factory.mktemp("libtpu")
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.compile_tpu", folder],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


@pytest.fixture(scope="module")
def committed():
    """What was counted when the kernels were last changed, with the libtpu that
    JAX 0.12.0.1 asks for."""
    table = pathlib.Path(__file__).with_name("tpu_bundles.csv")
    with table.open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def test_the_table_is_whole(committed):
    assert list(committed) == labels


# The whole weight is decoded nowhere.
@all_cases
def test_no_copy_of_the_weight(compiled, case):
    codes = {"ternary": 2, "binary": 1, "int8": 8}
    name = case.split()[1].split("-")[0]
    weight = 4096 * 4096 * codes.get(name, 4) // 8
    rows = int(case.split()[-1])
    # Inputs in another order, in two digits or none; outputs in another order.
    assert compiled[case]["temporary_bytes"] < weight / 4 + 16 * rows * 4096


@all_cases
def test_kernels(compiled, committed, case):
    assert compiled[case]["kernel"] == committed[case]["kernel"]
    is_xla = committed[case]["kernel"].startswith("xla")
    assert compiled[case]["calls"] == (0 if is_xla else 1)


# A bundle is what a core does in one cycle: here, for one tile of 2048x512 numbers.
@pytest.mark.parametrize("case", [case for case in labels if " int8 " not in case])
def test_bundles(compiled, committed, case):
    now, then = compiled[case]["bundles"], int(committed[case]["bundles"])
    print(f"{case}: {now} bundles, {then} before; {compiled[case]['spills']} spills")
    assert 0 < now <= 1.1 * then


# One tile of 2048x512 numbers of bfloat16 is copied in 3841 cycles of a v5e, and in
# 2238 of a v6e. All but lookups take less than half of that.
@pytest.mark.parametrize("generation, cycles", (("v5e", 3841), ("v6e", 2238)))
@pytest.mark.parametrize("name", ("int4", "int4-affine", "ternary", "binary"))
def test_a_few_rows_take_less_time_than_bfloat16(compiled, name, generation, cycles):
    for m in (1, 16):
        bundles = compiled[f"{generation} {name} matmul {m}"]["bundles"]
        assert 0 < bundles < cycles / 2


def test_a_model_over_four_chips(compiled):
    assert compiled["model"]["calls"] == 3


# Forward and back, of a product that is summed over two chips each. The kernels run on
# what a chip has.
@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
def test_a_model_that_is_split(compiled, kind):
    found = compiled[f"sharded {kind}"]
    assert found["calls"] == 4
    assert [name for _, name in found["collectives"]] == ["all-reduce"] * 2
    assert all("32,1,512" in shape for shape, _ in found["collectives"])
