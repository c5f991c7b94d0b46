import copy

import pytest

from . import folders
from .llama_files import fields_of, written


def test_tokenizer_of_bytes(tmp_path):
    found = fields_of(written(folders.write(tmp_path / "a", "Qwen2")))
    tokens = ["a", "b", "c", "\u0120", "ab", "abc", "\u0120a", "[PAD7]", "[PAD8]"]
    tokens += ["<s>", "</s>", "<tool>", *(f"[PAD{i}]" for i in range(12, 20))]
    assert {k: x for k, x in found.items() if k.startswith("tokenizer.")} == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 7 + [5, 5, 3, 3, 4] + [5] * 8,
        "tokenizer.ggml.merges": ["a b", "ab c", "\u0120 a"],
        "tokenizer.ggml.bos_token_id": 9,
        "tokenizer.ggml.eos_token_id": 10,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": "{{ a }}",
    }


def test_tokenizer_of_pieces(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama", bos_token_id=2)
    found = fields_of(written(folder))
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.tokens"][:12] == [
        *("<unk>", "<0x0A>", "a", "b", "c", "bc", "abc", "\u2581", "\u2581\u2581"),
        *("<s>", "</s>", "<tool>"),
    ]
    types = [2, 6, *[1] * 7, 3, 3, 4, *[5] * 8]
    assert found["tokenizer.ggml.token_type"] == types
    scores = found["tokenizer.ggml.scores"]
    # Pairs that come first have the largest scores.
    assert scores[5] == 0 > scores[8] > scores[6] > scores[2]
    flags = {k: x for k, x in found.items() if k.startswith("tokenizer.ggml.add")}
    assert flags == {
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }
    assert found["tokenizer.ggml.unknown_token_id"] == 0
    assert found["tokenizer.ggml.bos_token_id"] == 9

    # The scores of its own model are better.
    (folder / "tokenizer.model").write_bytes(folders.sentencepiece())
    tree = copy.deepcopy(folders.of_pieces) | {"added_tokens": []}
    tree["normalizer"] = tree["normalizer"]["normalizers"][1]
    tree["post_processor"] = None
    folders.write_json(folder / "tokenizer.json", tree)
    found = fields_of(written(folder))
    assert found["tokenizer.ggml.scores"][4:6] == [-1, -2.5]
    assert not found["tokenizer.ggml.add_space_prefix"]


def test_tokenizer_model_alone(tmp_path):
    folder = folders.write(tmp_path / "a", "Gemma", eos_token_id=[2, 1])
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(folders.sentencepiece(prefix=True))
    own = {"11": {"content": "<tool>", "special": False}}
    own |= {"1": {"content": "<s>", "special": True}, "x": {}}
    folders.write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": own})
    (folder / "chat_template.jinja").write_text("{{ b }}")
    found = fields_of(written(folder))
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "ab", "\u2581a", "  ", "[PAD7]"]
    assert found["tokenizer.ggml.tokens"][:8] == tokens
    assert found["tokenizer.ggml.tokens"][11] == "<tool>"
    types = [2, 3, 3, 6, 1, 1, 4, 5, 5, 5, 5, 4]
    assert found["tokenizer.ggml.token_type"][:12] == types
    assert found["tokenizer.ggml.scores"][4:6] == [-1, -2.5]
    assert found["tokenizer.ggml.add_space_prefix"]
    assert found["tokenizer.ggml.eos_token_id"] == 2
    assert found["tokenizer.chat_template"] == "{{ b }}"


def test_templates(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")
    templates = [{"name": "tools", "template": "a"}, {"name": "default"}]
    templates[1]["template"] = "b"
    # The first token is known from the template alone.
    folders.write_json(folder / "tokenizer_config.json", {"chat_template": templates})
    found = fields_of(written(folder))
    assert found["tokenizer.chat_template"] == "b"
    assert found["tokenizer.ggml.bos_token_id"] == 9
    assert "tokenizer.ggml.eos_token_id" not in found
    for wrong in ([{"name": []}, 3], 4, {}):
        folders.write_json(folder / "tokenizer_config.json", {"chat_template": wrong})
        with pytest.raises(ValueError, match="(objects|text) for 'chat_template'"):
            written(folder)
    folders.write_json(folder / "tokenizer_config.json", {})
    folders.write_json(folder / "chat_template.json", {"chat_template": "c"})
    assert fields_of(written(folder))["tokenizer.chat_template"] == "c"


def test_tokenizer_model_that_is_cut_short():
    from eqquant.interop._llama_cpp._sentencepiece import read_sentencepiece

    data = folders.sentencepiece()
    assert len(read_sentencepiece(data, "a").tokens) == 7
    # (What comes last need not be there.)
    for size in range(len(data) - 14):
        with pytest.raises(
            ValueError, match="a is not a SentencePiece model|Got model type 1"
        ):
            read_sentencepiece(data[:size], "a")


def test_pieces_that_are_merged_in_another_way(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")
    tree = copy.deepcopy(folders.of_pieces)
    tree["model"]["merges"] = tree["model"]["merges"][:2]
    folders.write_json(folder / "tokenizer.json", tree)
    with pytest.warns(UserWarning, match="not made from a model of SentencePiece"):
        written(folder)


_words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_llama_3 = rf"{_words}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_rest}"


def _split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}


def _byte_level(use_regex):
    own = {"add_prefix_space": False, "use_regex": use_regex}
    return {"type": "ByteLevel", **own}


@pytest.mark.parametrize(
    "steps, ignores, name",
    [
        ([_split(_llama_3), _byte_level(False)], True, "llama-bpe"),
        ([_split(_llama_3), _byte_level(False)], False, "dbrx"),
        ([_byte_level(True)], False, "gpt-2"),
        (
            [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
            False,
            "smollm",
        ),
        ([_split("other"), _byte_level(False)], False, None),
        ([{"type": "Whitespace"}], False, None),
        ([], False, None),
    ],
)
def test_how_text_is_split(steps, ignores, name, tmp_path):
    folder = folders.write(tmp_path / "a", "Qwen2")
    tree = copy.deepcopy(folders.of_bytes)
    tree["model"]["ignore_merges"] = ignores
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    if len(steps) == 1:
        (tree["pre_tokenizer"],) = steps
    folders.write_json(folder / "tokenizer.json", tree)
    if name is None:
        with pytest.raises(ValueError, match="none of llama-bpe, dbrx, qwen2"):
            written(folder)
        path = written(folder, metadata={"tokenizer.ggml.pre": "falcon"})
        assert fields_of(path)["tokenizer.ggml.pre"] == "falcon"
    else:
        assert fields_of(written(folder))["tokenizer.ggml.pre"] == name
