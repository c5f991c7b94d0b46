"""Whether llama.cpp runs what is written for it, with the logits and the tokens of
transformers. It takes a Python, named by `EQQUANT_LLAMA_CPP`, with the packages that
`requirements.txt` beside this file lists: `pytest -m processes tests/llama_cpp`."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop


pytestmark = pytest.mark.processes

here = pathlib.Path(__file__).parent
python = os.environ.get("EQQUANT_LLAMA_CPP", sys.executable)
texts = [
    "Hello, world!",
    "  two  spaces and\ttabs\n\nnewlines ",
    "It's 12345 o'CLOCK, we'LL see 3.14159",
    "Größe naïve café 日本語 Привет 🚀🦙",
    "def f(x):\n        return x ** 2  # ok",
    "",
    " ",
    "▁under▁",
    "\r\n\r\n x",
]
# Only where they are looked for in text.
specials = ["a<s>b</s> <|user|>x<think>y", "<|user|> <|user|>\n<s>"]
kinds = [
    *("llama2", "llama3", "llama-linear", "llama-yarn", "llama-biases", "mistral"),
    *("nemo", "qwen2", "qwen2-yarn", "qwen3", "gemma", "gemma2", "gemma3"),
    "gemma3-pattern",
]


def _run(*args):
    command = [python, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    packages = "import llama_cpp, sentencepiece, tokenizers, torch, transformers"
    if subprocess.run([python, "-c", packages], capture_output=True).returncode != 0:
        pytest.skip(
            "LLAMA.CPP WAS NOT TRIED: set EQQUANT_LLAMA_CPP to a Python with the "
            f"packages in {here / 'requirements.txt'}."
        )
    folder = tmp_path_factory.mktemp("models")
    _run(here / "make.py", "all", folder)
    return folder


def _compared(file, folder, out, has_specials=True, block=0):
    """The differences of logits: the largest one, relative to the largest logit; that
    of all, relative to their norm; and that of the best position. And the share of
    tokens that are predicted alike. The texts are split alike.

    llama.cpp rounds the inputs of products with quantized weights, in blocks of 32 or
    of 256 numbers; and so does transformers here, given such a `block`."""
    wanted = json.dumps(texts + specials if has_specials else texts)
    found = {}
    for kind, path in (("llama_cpp", file), ("transformers", folder)):
        _run(here / "run.py", kind, path, block, wanted, out / f"{kind}.npz")
        found[kind] = np.load(out / f"{kind}.npz")
    ours, theirs = found["llama_cpp"], found["transformers"]
    for i, text in enumerate(json.loads(wanted)):
        tokens = [x[f"tokens.{i}"].tolist() for x in (ours, theirs)]
        assert tokens[0] == tokens[1], repr(text)
    x, y = ours["logits"], theirs["logits"]
    largest = np.max(np.abs(x - y)) / np.max(np.abs(y))
    usual = np.linalg.norm(x - y) / np.linalg.norm(y)
    best = np.min(np.linalg.norm(x - y, axis=-1) / np.linalg.norm(y, axis=-1))
    return largest, usual, best, np.mean(x.argmax(-1) == y.argmax(-1))


def _has_specials(folder):
    return (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("kind", kinds)
def test_float32(kind, folders, tmp_path, capsys):
    folder, file = folders / kind, tmp_path / "model.gguf"
    interop.write_gguf(file, interop.open(folder), config=folder)
    found = _compared(file, folder, tmp_path, _has_specials(folder))
    _say(capsys, kind, "float32", found)
    largest, usual, _, same = found
    # ggml looks up GELU in a table of float16.
    assert largest < (2e-3 if "gemma" in kind else 3e-5)
    assert same == 1


def _dense_again(source, out, outcomes):
    """The model that a quantized one stands for, for transformers."""
    from safetensors.numpy import save_file

    shutil.copytree(source, out)
    rules = [(x.name, x.format) for x in outcomes if x.sqnr is not None]
    # By the same programs, since compiled in another way, others may round otherwise.
    packed = out.with_suffix(".safetensors")
    interop.convert(source, packed, None, rules=rules)
    arrays = eqq.tree_dequantize(dict(interop.open(packed)))
    arrays = {name: np.asarray(w) for name, w in arrays.items()}
    save_file(arrays, out / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "format",
    ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
    + ["IQ4_NL", "MXFP4", "TQ1_0", "TQ2_0"],
)
@pytest.mark.parametrize("kind", ["llama3"])
def test_formats(kind, format, folders, tmp_path, capsys):
    _check_format(kind, format, folders, tmp_path, capsys)


@pytest.mark.parametrize("format", ["Q4_K"])
@pytest.mark.parametrize("kind", [kind for kind in kinds if kind != "llama3"])
def test_families(kind, format, folders, tmp_path, capsys):
    _check_format(kind, format, folders, tmp_path, capsys)


def _check_format(kind, format, folders, tmp_path, capsys):
    folder, file = folders / kind, tmp_path / "model.gguf"
    outcomes = interop.convert(folder, file, format, embeddings=True)
    assert sum(x.sqnr is not None for x in outcomes) >= 7 * 3 + 1
    dense = tmp_path / "dense"
    _dense_again(folder, dense, outcomes)
    block = 256 if format.endswith("_K") or format.startswith("TQ") else 32
    found = _compared(file, dense, tmp_path, _has_specials(folder), block)
    _say(capsys, kind, format, found)
    # Where a number lies between two of 8 bits, it may go to either, and the positions
    # after it differ from there on. (GELU is never quite the same; nor are types with
    # minima, for which llama.cpp also rounds the sums of inputs.)
    _, usual, best, same = found
    assert usual < 0.05 and same > 0.85
    is_close = "gemma" in kind or format in ("Q4_1", "Q5_1")
    assert best < (3e-2 if is_close else 1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves(dtype, folders, tmp_path, capsys):
    from safetensors.numpy import save_file

    folder = tmp_path / "half"
    shutil.copytree(folders / "llama3", folder)
    arrays = interop.open(folders / "llama3").items()
    arrays = {name: np.asarray(x.astype(dtype)) for name, x in arrays}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    file = tmp_path / "model.gguf"
    interop.write_gguf(file, interop.open(folder), config=folder)
    found = _compared(file, folder, tmp_path)
    _say(capsys, "llama3", dtype, found)
    largest, usual, _, same = found
    # The inputs of products are rounded to the same type.
    assert usual < {"float16": 0.003, "bfloat16": 0.02}[dtype] and same > 0.9


# From a file, to a file of other types, with the command.
def test_from_gguf(folders, tmp_path, capsys):
    folder, file = folders / "llama3", tmp_path / "model.gguf"
    interop.write_gguf(file, interop.open(folder), config=folder)
    again = tmp_path / "again.gguf"
    options = ["--format", "q8_0", "--rule", "output.weight=q6_k"]
    command = [sys.executable, "-m", "eqquant", "quantize", *options, file, again]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    found = _compared(again, folder, tmp_path)
    _say(capsys, "llama3", "Q8_0, again", found)
    largest, usual, _, same = found
    assert usual < 0.08 and same > 0.8
    other = tmp_path / "other.gguf"
    interop.write_gguf(other, interop.open(folder), config=again)
    largest, *_ = _compared(other, folder, tmp_path)
    assert largest < 3e-5


def _say(capsys, kind, format, found):
    largest, usual, best, same = found
    with capsys.disabled():
        print(
            f"\n  {kind}, {format}: logits differ by {largest:.1e} of the largest, by "
            f"{usual:.1e} of their norm, and by {best:.1e} at best; {same:.0%} of "
            "predictions agree",
            end="",
        )
