import pathlib
import re

import jax
import pytest


readme = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


# What the README shows is what runs, from the first line to the last.
def test_code(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 14
    names: dict = {"__name__": "readme"}
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"^# (QuantizedArray.*)$", readme, re.MULTILINE)
    assert shown in printed
    assert repr(names["w"]).startswith("QuantizedArray(f32[512,512], Int2(")
    assert names["w"].bits_per_weight == 2.5


# The eight lines that a format takes are eight.
def test_format_is_short():
    (body,) = re.findall(r"^(class Int2.*?)\n\n", readme, re.DOTALL | re.MULTILINE)
    assert len(body.splitlines()) == 8


@pytest.mark.parametrize("name", ("demo", "tests"))
def test_commands_are_one_line(name):
    (command,) = re.findall(rf"<!-- {name} -->\n```sh\n(.*?)```", readme, re.DOTALL)
    assert len(command.splitlines()) == 1
