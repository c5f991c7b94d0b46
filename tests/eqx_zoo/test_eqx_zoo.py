"""Files into the models of eqx-zoo, untouched. It takes a Python, named by
`EQQUANT_EQX_ZOO`, with the packages of this library and those that `requirements.txt`
beside this file lists: `pytest -m processes tests/eqx_zoo`."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from eqquant import interop

from ..interop import families, files


pytestmark = pytest.mark.processes

here = pathlib.Path(__file__).parent
python = os.environ.get("EQQUANT_EQX_ZOO", sys.executable)


@pytest.fixture(autouse=True)
def _there_is_one():
    tried = subprocess.run([python, "-c", "import eqx_zoo"], capture_output=True)
    if tried.returncode != 0:
        pytest.skip(
            "EQX-ZOO WAS NOT TRIED: set EQQUANT_EQX_ZOO to a Python with the packages "
            f"in {here / 'requirements.txt'}."
        )


def test_logits(tmp_path, capsys):
    command = [python, "-m", "tests.eqx_zoo.run", str(tmp_path)]
    root = here.parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        for name, difference in found.items():
            print(f"\n  {name}: logits differ by {difference:.1e}", end="")
    assert len(found) == 4 * 12
    assert all(difference < 1e-4 for difference in found.values()), found


# The command, of a file in GGUF and of a folder, whose predictions are those of the
# model that it was quantized from.
def test_evaluate(tmp_path):
    family = "Qwen3Moe"
    arrays = families.arrays(family)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(families.config(family)))
    files.save(folder / "model.safetensors", arrays)
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(" ".join(map(str, families.tokens.tolist())))
    small = tmp_path / "small"
    interop.convert(folder, small, "int8", min_size=0)
    argv = [small, tokens, "--dense", folder, "--length", "10", "--layers"]
    command = [python, "-m", "eqquant", "evaluate", *map(str, argv)]
    command += ["--config", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here.parents[1])
    assert done.returncode == 0, done.stderr
    assert "divergence" in done.stdout
    # Of 24 tokens in three texts, the first of each is not predicted.
    assert "of 21 tokens" in done.stdout
    *_, first, second = done.stdout.splitlines()
    for i, line in enumerate((first, second)):
        layer, error = line.split()
        assert int(layer) == i and 1e-4 < float(error) < 0.1
