"""Models of other packages, quantized in one call with `example=`. It takes a Python,
named by `EQQUANT_EXAMPLE_MODELS`, with the packages of this library and those that
`requirements.txt` beside this file lists:
`pytest -m processes tests/example_models`."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


pytestmark = pytest.mark.processes

here = pathlib.Path(__file__).parent
python = os.environ.get("EQQUANT_EXAMPLE_MODELS", sys.executable)
# What is written here needs no package.
own = {"LSTM", "scan over layers", "stacked experts", "fields of containers"}


def test_models(capsys):
    command = [python, "-m", "tests.example_models", "--json"]
    root = here.parents[1]
    # (XLA's flags are those of the JAX that runs this test.)
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=env)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    found, missing = content["found"], content["missing"]
    with capsys.disabled():
        for name, row in found.items():
            print(f"\n  {name}: {row}", end="")
    assert own <= {*found}
    for name, row in found.items():
        assert row["share"] >= 0.95, (name, row)
        for of in ("eager", "jitted", "inputs", "others"):
            assert row[of] is None or row[of] < 5e-3, (name, of, row)
        assert row["inputs"] is not None or row["others"] is not None, name
    if missing:
        pytest.skip(
            f"MODELS OF {sorted({*missing.values()})} WERE NOT TRIED: set "
            "EQQUANT_EXAMPLE_MODELS to a Python with the packages in "
            f"{here / 'requirements.txt'}."
        )
