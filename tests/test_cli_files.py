import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant._cli import main
from eqquant._cli._values import as_axis, as_bytes, format_from_text

from .helpers import normal
from .interop import files, large, llama


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "model"
    large.write(folder, 64, 96, 1, 64)
    return folder


def _mistake(capsys, *argv):
    try:
        status = main([str(x) for x in argv])
    except SystemExit as e:
        status = e.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_quantize_and_compare(source, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["quantize", source, out, "--format", "NF4(32)", "--rule", "*.embed*=int8"]
    assert main([str(x) for x in argv]) == 0
    text = capsys.readouterr().out
    assert "model.embed_tokens.weight" in text and "Int8()" in text
    assert "12 arrays, 9 quantized" in text
    assert "bits/weight" in text and "dB" in text
    _, worst = text.split("Arrays with the largest errors")
    assert len(worst.split("\n")) <= 13 and worst.count("dB") == 9
    weights = interop.open(out)
    name = "model.embed_tokens.weight"
    assert weights[name].format == eqq.Int8()
    assert weights["lm_head.weight"].format == eqq.NF4(32)

    assert main(["compare", str(source), str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    assert "dB" in line and "float32 → Int8()" in line
    (line,) = [line for line in lines if line.startswith("model.norm.weight")]
    assert "exact" in line
    assert main(["inspect", str(out)]) == 0
    assert "Int8()" in capsys.readouterr().out

    # What differs by more than rounding.
    other = tmp_path / "other.safetensors"
    arrays = {
        "lm_head.weight": np.asarray(normal(64, 64)),
        name: np.ones((3, 3), np.float32),
    }
    files.save(other, arrays)
    assert main(["compare", str(source), str(other)]) == 1
    text = capsys.readouterr().out
    assert "shapes differ: (64, 64) and (3, 3)" in text
    assert f"model.norm.weight: only in {source}" in text


def test_inspect_and_compare_gguf(tmp_path, capsys):
    arrays, metadata = llama.to_gguf(llama.Llama(jr.key(0)), None)
    interop.write_gguf(tmp_path / "a.gguf", arrays, metadata)
    assert main(["inspect", str(tmp_path / "a.gguf")]) == 0
    text = capsys.readouterr().out
    assert "general.architecture: 'llama'" in text
    assert "tokenizer.ggml.tokens: ['a', 'b', 'c', ...] (32)" in text
    assert "blk.0.ffn_up.weight" in text
    names = {interop.renamed(name, "llama")[0]: x for name, x in arrays.items()}
    arrays = {name: np.asarray(x) for name, x in names.items()}
    files.save(tmp_path / "b.safetensors", arrays)
    argv = ["compare", str(tmp_path / "a.gguf"), str(tmp_path / "b.safetensors")]
    assert main([*argv, "--rename", "llama"]) == 0
    text = capsys.readouterr().out
    assert text.count("exact") == len(arrays)
    assert "no names in common" in _mistake(capsys, *argv)


@pytest.mark.parametrize(
    "argv, word",
    [
        (["--rule", "embed"], "'embed'"),
        (["--rule", "*.atention.*=int8"], "'*.atention.*'"),
        (["--rule", "*=int9"], "'int9'"),
        (["--format", "NF4("], "'NF4('"),
        (["--format", "NF4(blocks=3)"], "blocks"),
        (["--format", "NF4(17)"], "17"),
        (["--format", "nf4", "--to", "mlx"], "MLX"),
        (["--shard-size", "many"], "'many'"),
        (["--shard-size", "1e400"], "'1e400'"),
        (["--shard-size", f"{10**400}TB"], "2^63"),
        (["--to", "torch"], "'torch'"),
        (["--axis", "0"], "--axis"),
        (["--axis", "=-1"], "'=-1'"),
        (["--axis", "*.atention.*=-2"], "'*.atention.*'"),
    ],
)
def test_mistakes(source, tmp_path, capsys, argv, word):
    assert word in _mistake(capsys, "quantize", source, tmp_path / "out", *argv)
    assert list(tmp_path.iterdir()) == []


def test_mistakes_of_files(source, tmp_path, capsys):
    missing = tmp_path / "missing"
    for argv in (
        ["quantize", missing, tmp_path / "out"],
        ["inspect", missing],
        ["compare", source, missing],
    ):
        assert str(missing) in _mistake(capsys, *argv)
    assert str(source) in _mistake(capsys, "quantize", source, source)


def test_interrupted(source, tmp_path, capsys, monkeypatch):
    def convert(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(interop, "convert", convert)
    out = tmp_path / "out"
    (tmp_path / "out.partial").mkdir()
    assert main(["quantize", str(source), str(out)]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "interrupted" in line and "to resume" in line


def test_values():
    assert as_bytes("5GB") == 5 * 10**9
    assert as_bytes("1.5 mb") == 1_500_000
    assert as_bytes("2e9") == 2 * 10**9
    assert as_bytes("17") == 17
    assert as_axis("-2") == ("*", -2)
    assert as_axis("a=b.*=-1") == ("a=b.*", -1)
    assert as_axis("a.*=-2,-1") == ("a.*", (-2, -1))
    assert format_from_text("None") is None
    assert format_from_text("nf4") == eqq.NF4()
    text = "Int(3, block_size=32, offset='minimum', scale_dtype=bfloat16)"
    expected = eqq.Int(3, 32, "minimum", scale_dtype="bfloat16")
    assert format_from_text(text) == expected
    nested = format_from_text("nested(NF4(16), scale=int8(32))")
    assert nested == eqq.Nested(eqq.NF4(16), scale=eqq.Int8(32))


@pytest.mark.thorough
def test_quantize_with_statistics(source, tmp_path, capsys):
    checkpoint = interop.open(source)
    names = [name for name in checkpoint if checkpoint[name].ndim == 2]
    k = {name: checkpoint[name].shape[-1] for name in names}
    model = {name: np.asarray(checkpoint[name]) for name in names}
    size = {name: np.exp(np.arange(k[name]) % 7 / 2) for name in names}
    call = lambda model, x: [x[name] @ model[name].T for name in names]
    rows = lambda name: np.asarray(normal(200, k[name])) * size[name]
    stats = eqq.calibrate(call, model, [{name: rows(name) for name in names}])
    eqq.save(tmp_path / "stats.safetensors", stats.as_tree())
    interop.write_imatrix(tmp_path / "imatrix.gguf", stats)

    def lost(out, *options):
        argv = ["quantize", source, tmp_path / out, "--format", "int4", *options]
        assert main([str(x) for x in argv]) == 0
        weights, total = interop.open(tmp_path / out), 0.0
        for name in names:
            if eqq.is_quantized(weights[name]):
                error = weights[name].dequantize() - model[name]
                total += float(np.sum((rows(name) @ np.asarray(error).T) ** 2))
        return total

    plain = lost("plain")
    imatrix = lost("imatrix", "--imatrix", tmp_path / "imatrix.gguf")
    found = lost("found", "--statistics", tmp_path / "stats.safetensors")
    assert found < imatrix < 0.7 * plain
    assert lost("search", "--method", "scale-search") < plain
    capsys.readouterr()
    out = tmp_path / "none"
    both = ["--imatrix", source, "--statistics", source]
    assert "--statistics" in _mistake(capsys, "quantize", source, out, *both)
    assert "needs what" in _mistake(capsys, "quantize", source, out, "--method", "gptq")
    missing = tmp_path / "missing"
    assert "missing" in _mistake(capsys, "quantize", source, out, "--imatrix", missing)
