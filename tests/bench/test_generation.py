import io
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import eqquant as eqq
from eqquant import bench, interop
from eqquant._cli import main
from eqquant.bench._decoder import empty_past, random_decoder
from eqquant.bench._generation import _generation
from eqquant.bench._generation._child import generate, memory, most_likely
from eqquant.bench._generation._file import read_model, write_model


_size = bench.Size(vocabulary=32, width=32, hidden=64, depth=2, heads=2, positions=12)


@pytest.mark.thorough
def test_several_tokens_at_once():
    model = random_decoder(_size, 0)
    tokens = jnp.asarray([3, 1, 4, 1, 5])
    past = empty_past(_size)
    for i, token in enumerate(tokens):
        logits, past = model(token, jnp.asarray(i), past)
    start = jnp.asarray(0)
    first, half = model.read(tokens[:2], start, empty_past(_size))
    found, whole = model.read(tokens[2:], jnp.asarray(2), half)
    np.testing.assert_allclose(found, logits, atol=1e-4)
    for a, b in zip(past, whole):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_most_likely():
    logits = jnp.asarray([[0, 3, 3, -jnp.inf], [-1, -2, -3, -1], [0, 1, jnp.inf, 2]])
    np.testing.assert_array_equal(most_likely(logits), [1, 0, 2])


@pytest.mark.examples(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_generated_tokens(dtype):
    model = random_decoder(_size, 1)
    past = jax.tree.map(lambda x: jnp.stack([x] * 3), empty_past(_size, dtype))
    given = jnp.asarray([1, 2, 30])
    tokens, _ = generate(model, given, 0, past, 6)
    step = eqx.filter_jit(lambda model, *args: model(*args))
    for stream, token in enumerate(given):
        past = empty_past(_size, dtype)
        for i in range(6):
            logits, past = step(model, token, jnp.asarray(i), past)
            token = jnp.argmax(logits)
            assert token == tokens[i, stream]


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "format, kind", [(None, "gguf"), ("q8_0", "gguf"), ("nf4", "safetensors")]
)
def test_files(format, kind, tmp_path):
    dense = random_decoder(_size, 2)
    wanted = None if format is None else eqq.formats.as_format(format)
    path = write_model(tmp_path, dense, _size, wanted)
    assert path.suffix == f".{kind}"
    model = dense if format is None else eqq.tree_quantize(dense, format)
    again = read_model(path, _size)
    args = jnp.arange(4), jnp.asarray(0), empty_past(_size)
    call = eqx.filter_jit(lambda model, *args: model.read(*args)[0])
    np.testing.assert_array_equal(call(again, *args), call(model, *args))
    if kind == "gguf":
        metadata = interop.open(path).metadata
        assert metadata["llama.block_count"] == _size.depth
        assert metadata["tokenizer.ggml.model"] == "none"


@pytest.mark.thorough
def test_rows(monkeypatch):
    monkeypatch.setattr(_generation, "llama_cpp_python", lambda: None)
    shown = []
    rows = bench.measure_generation(
        ["nf4"],
        size=_size,
        prompts=(4, 6),
        streams=(1, 2),
        number=3,
        seconds=0,
        show=lambda share, what: shown.append(what),
    )
    assert [(row.library, row.format) for row in rows] == [
        ("eqquant", "float32"),
        ("eqquant", "NF4()"),
    ]
    for row in rows:
        assert list(row.prefill) == [4, 6] and list(row.decode) == [1, 2]
        assert min(*row.prefill.values(), *row.decode.values()) > 0
    dense, row = rows
    assert dense.error == 0 < row.error < 1
    assert row.nbytes < dense.nbytes
    if sys.platform == "linux":
        assert 0 < row.idle_bytes < row.resident_bytes <= row.most_bytes * 1.01
    assert {"eqquant, float32", "eqquant, NF4()"} <= set(shown)
    console = Console(file=io.StringIO(), width=100)
    console.print(_generation.generation_table(rows))
    text = console.file.getvalue()
    assert "NF4()" in text and "eqquant" in text


def test_memory_of_this_process():
    found = memory()
    assert sys.platform != "linux" or found["most"] >= found["resident"] > 10**7


@pytest.mark.parametrize("name", ["false", "no such program"])
def test_a_python_without_llama_cpp(name, monkeypatch):
    monkeypatch.setenv("EQQUANT_LLAMA_CPP", name)
    assert _generation.llama_cpp_python() is None


def test_command(monkeypatch, capsys):
    def measured(formats, show):
        show(0.5, "eqquant, float32")
        speeds = {128: 1.0, 512: 2.0}, {1: 3.0, 8: 4.0}
        assert formats == ["q8_0"]
        return [
            bench.Generation(
                "eqquant", "float32", 10**6, *speeds, None, None, None, 0.0
            )
        ]

    monkeypatch.setattr(_generation, "measure_generation", measured)
    monkeypatch.setattr(_generation, "llama_cpp_python", lambda: None)
    assert main(["bench", "--llama", "--formats", "q8_0"]) == 0
    printed = capsys.readouterr().out
    assert "llama.cpp is not measured" in printed and "continue" in printed
    monkeypatch.undo()
    assert main(["bench", "--llama", "--formats", "q99"]) == 2
