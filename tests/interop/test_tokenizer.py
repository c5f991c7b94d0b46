"""Tokenizers of GGUF files against those that `tokenizers` trained and, for pieces of
SentencePiece, against its algorithm written in Python."""

import json
import pathlib
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from eqquant import interop

from . import folders


_words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_word = r"[^\r\n\p{L}\p{N}]?\p{L}+"


def _regex(pattern):
    return [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_splits = {
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": _regex(rf"{_words}|{_word}|\p{{N}}|{_rest}"),
    "llama-bpe": _regex(rf"{_words}|{_word}|\p{{N}}{{1,3}}|{_rest}"),
}
_corpus = pathlib.Path(re.__file__).read_text()
_corpus += "Größe, naïve café. 日本語のテキスト. Привет 🚀🦙 " * 9


def _texts(number=40):
    """Random text of several scripts, and some in which little things matter."""
    random = np.random.default_rng(0)
    ranges = [(32, 127)] * 4 + [(32, 48), (160, 592), (1024, 1280), (12352, 12448)]
    ranges += [(0x4E00, 0x5000), (0x1F600, 0x1F640), (9, 14)]
    for _ in range(number):
        chosen = random.integers(len(ranges), size=random.integers(1, 60))
        yield "".join(chr(random.integers(*ranges[i])) for i in chosen)
    yield from ("", " ", "  two  spaces\r\n\r\n x", "it's 12345 we'LL <s>x</s>", "⅕²٣1")


def _trained(name):
    found = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    found.pre_tokenizer = pre_tokenizers.Sequence(_splits[name])
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(_corpus.splitlines(keepends=True), trainer)
    return found


def _opened(folder, metadata):
    path = folder / "model.gguf"
    interop.write_gguf(path, {"w": jnp.ones((2, 32))}, metadata)
    with interop.open(path) as checkpoint:
        return checkpoint


def _of_bytes(found, name, **more):
    model = json.loads(found.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(vocab) - 2)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.mark.parametrize("name", _splits)
def test_bytes(name, tmp_path):
    wanted = _trained(name)
    metadata = _of_bytes(wanted, name, add_bos_token=False)
    found = interop.tokenizer(_opened(tmp_path, metadata))
    for text in _texts():
        ids = wanted.encode(text).ids
        assert found.encode(text).ids == ids, repr(text)
        assert found.decode(ids) == wanted.decode(ids)
        assert found.decode(ids, skip_special_tokens=False) == text
    assert found.get_vocab_size() == wanted.get_vocab_size()


def test_ends(tmp_path):
    trained = _trained("llama-bpe")
    ids = trained.encode("a text").ids
    # llama.cpp adds the first token for Llama 3, if the file does not say.
    found = interop.tokenizer(_opened(tmp_path, _of_bytes(trained, "llama3")))
    assert found.encode("a text").ids == [0, *ids]
    assert found.encode("a text", add_special_tokens=False).ids == ids
    assert found.decode([0, *ids]) == "a text"
    more = {"add_eos_token": True, "add_bos_token": False}
    found = interop.tokenizer(_opened(tmp_path, _of_bytes(trained, "llama3", **more)))
    assert found.encode("a text").ids == [*ids, 1]
    # A file that names no way to split text, or an unknown one.
    for name in ("default", ""):
        checkpoint = _opened(tmp_path, _of_bytes(trained, name, add_bos_token=False))
        with pytest.raises(ValueError, match=f"llama-bpe.*qwen2.*Got '{name}'"):
            interop.tokenizer(checkpoint)
        found = interop.tokenizer(checkpoint, pre="llama-bpe")
        assert found.encode("a text").ids == ids


def _pieces():
    """The tokens of a vocabulary of pieces, with scores, and their types."""
    trained = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    text = _corpus.replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trained.train_from_iterator(text.splitlines(), trainer)
    vocab = trained.get_vocab()
    pieces = sorted(vocab, key=vocab.get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    return tokens, types, [0.0] * 259 + [-float(i) for i in range(len(pieces))]


def _merged(text, numbers, scores):
    """The numbers of the pieces of a text, by SentencePiece's algorithm: the adjacent
    pair whose piece has the largest score is merged, the leftmost of several."""
    parts = [*text.replace(" ", "\u2581")]
    while True:
        pairs = [
            (-scores[numbers[a + b]], i)
            for i, (a, b) in enumerate(zip(parts, parts[1:]))
            if a + b in numbers
        ]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found = []
    for part in parts:
        as_bytes = [numbers[f"<0x{byte:02X}>"] for byte in part.encode()]
        found += [numbers[part]] if part in numbers else as_bytes
    return found


@pytest.mark.parametrize("prefix", (True, False))
def test_pieces(prefix, tmp_path):
    tokens, types, scores = _pieces()
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    found = interop.tokenizer(_opened(tmp_path, metadata))
    numbers = {token: i for i, token in enumerate(tokens)}
    for text in _texts():
        if "<s>" in text:
            continue
        begun = " " * (prefix and text != "") + text
        wanted = [1, *_merged(begun, numbers, scores)]
        assert found.encode(text).ids == wanted, repr(text)
        assert found.decode(wanted) == text.replace("\u2581", " ")
    assert found.encode("<s></s>", add_special_tokens=False).ids == [1, 2]


def test_tables_that_are_damaged(tmp_path):
    good = _of_bytes(_trained("gpt-2"), "gpt-2", add_bos_token=False)
    tokens = good["tokenizer.ggml.tokens"]
    for key, value, message in (
        ("model", "bert", "'gpt2'.*'llama'.*Got 'bert'"),
        ("tokens", tokens[:5] + tokens[:5], "tokens that differ"),
        ("tokens", [1, 2], "text for 'tokenizer.ggml.tokens'"),
        ("token_type", [1, 1], "one for each token.*Got 2"),
        ("merges", ["a b c"], "pairs of tokens.*'a b c'"),
        ("merges", ["ab"], "pairs of tokens.*'ab'"),
        ("add_bos_token", 3, "true or false"),
    ):
        checkpoint = _opened(tmp_path, good | {f"tokenizer.ggml.{key}": value})
        with pytest.raises(ValueError, match=message):
            interop.tokenizer(checkpoint)
    bad = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**6}
    with pytest.raises(ValueError, match="the number of a token.*1000000"):
        interop.tokenizer(_opened(tmp_path, good | bad))


def test_folder(tmp_path):
    folder = folders.write(tmp_path / "a", "Qwen2")
    model = folders.of_bytes["model"]
    wanted = tokenizers.Tokenizer(
        models.BPE(model["vocab"], [("a", "b"), ("ab", "c"), ("\u0120", "a")])
    )
    wanted.pre_tokenizer = pre_tokenizers.Sequence(_splits["qwen2"])
    wanted.add_special_tokens(["<s>", "</s>"])
    wanted.add_tokens(["<tool>"])
    wanted.save(str(folder / "tokenizer.json"))
    with interop.open(folder) as checkpoint:
        found = interop.tokenizer(checkpoint)
    assert found.to_str() == wanted.to_str()
    # Of a file that was made from it, for llama.cpp.
    file = tmp_path / "a.gguf"
    interop.write_gguf(file, interop.open(folder), config=folder)
    again = interop.tokenizer(interop.open(file))
    for text in ("abc aab cab", "a<tool>b</s>"):
        ids = wanted.encode(text).ids
        assert again.encode(text, add_special_tokens=False).ids == ids
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="Could not read.*tokenizer.json"):
        interop.tokenizer(checkpoint)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.ggml.model.*Got neither"):
        interop.tokenizer(checkpoint)


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    checkpoint = _opened(tmp_path, {"general.architecture": "llama"})
    with pytest.raises(ImportError, match=r'pip install "eqquant\[text\]"'):
        interop.tokenizer(checkpoint)
