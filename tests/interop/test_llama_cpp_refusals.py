import copy
import random

import pytest

from eqquant import interop

from . import folders
from .fuzz import mutated
from .llama_files import llama3, written


_of_configs = [
    ({"architectures": ["GPT2LMHeadModel"]}, "one of LlamaForCausalLM, .*Got .*GPT2"),
    ({"architectures": ...}, "'architectures'. It has none"),
    ({"hidden_size": ...}, "positive integer for 'hidden_size'. It has none"),
    ({"num_hidden_layers": -1}, "positive integer for 'num_hidden_layers'. Got -1"),
    ({"num_hidden_layers": 10**9}, "a number up to 512 for 'num_hidden_layers'"),
    ({"hidden_size": 2**40}, "a number up to"),
    ({"num_attention_heads": "4"}, "for 'num_attention_heads'. Got '4'"),
    ({"rms_norm_eps": ...}, "positive number for 'rms_norm_eps'. It has none"),
    ({"max_position_embeddings": True}, "'max_position_embeddings'. Got True"),
    ({"vocab_size": ...}, "'vocab_size'. It has none"),
    ({"vocab_size": 2**22}, "a number up to"),
    ({"vocab_size": 21}, r"'model.embed_tokens.weight' should have the shape \(21, 32"),
    (
        {"num_hidden_layers": 3},
        "should be 'model.layers.2.input_layernorm.weight' .'blk",
    ),
    ({"num_hidden_layers": 1}, "'model.layers.1.* has no place in the architecture"),
    ({"num_key_value_heads": 4}, r"k_proj.weight' should have the shape \(64, 32\)"),
    ({"hidden_act": "gelu"}, "'silu', as in llama.cpp, for 'hidden_act'. Got 'gelu'"),
    ({"head_dim": 7}, "an even number for 'head_dim'"),
    ({"rope_scaling": {"type": "dynamic"}}, "default, linear, yarn.* Got 'dynamic'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "'factor'. It has none"),
    ({"rope_scaling": llama3 | {"high_freq_factor": 1}}, "a number above 1.0"),
    ({"rope_scaling": []}, "an object for 'rope_scaling'"),
    ({"partial_rotary_factor": 0.5}, "rotates whole heads"),
    ({"tie_word_embeddings": 1}, "true or false for 'tie_word_embeddings'"),
]


@pytest.mark.parametrize("changes, match", _of_configs)
def test_configurations_that_are_refused(changes, match, tmp_path):
    folder = folders.write(tmp_path / "a", "Llama", **changes)
    with pytest.raises(ValueError, match=match):
        written(folder)
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize(
    "kind, changes, match",
    [
        ("Gemma2", {"query_pre_attn_scalar": 100}, "16, as in llama.cpp"),
        ("Gemma2", {"final_logit_softcapping": None}, "'final_logit_softcapping'"),
        ("Gemma2", {"sliding_window": ...}, "'sliding_window'. It has none"),
        ("Gemma3", {"attn_logit_softcapping": 3.0}, "null, as in llama.cpp"),
        ("Gemma3", {"layer_types": ["full_attention"]}, "for each layer"),
        ("Gemma3", {"use_bidirectional_attention": True}, "false, as in llama.cpp"),
        ("Gemma", {"tie_word_embeddings": False}, "true, as in llama.cpp"),
        ("Qwen2", {"rope_scaling": llama3}, "a kind other than llama3"),
        (
            "Qwen3",
            {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1}},
            "mscale",
        ),
    ],
)
def test_what_llama_cpp_lacks(kind, changes, match, tmp_path):
    folder = folders.write(tmp_path / "a", kind, **changes)
    with pytest.raises(ValueError, match=match):
        written(folder)


def _at(tree, path, value):
    *path, last = path
    tree = copy.deepcopy(tree)
    node = tree
    for key in path:
        node = node[key]
    node[last] = value
    return tree


_template = {"type": "TemplateProcessing"}


@pytest.mark.parametrize(
    "path, value, match",
    [
        (("model", "type"), "Unigram", "'BPE', as in these"),
        (("model", "vocab"), ["a"], "tokens and their numbers"),
        (("model", "vocab", "a"), -1, "token 'a' should have a number. Got -1"),
        (("model", "vocab", "a"), "0", "token 'a' should have a number"),
        (("model", "vocab"), {}, None),
        (("model", "vocab", "\ud800"), 8, "'.ud800' should be text"),
        (("model", "vocab", "[PAD15]"), 8, "named .PAD...., like unused"),
        (("model", "merges"), [], "pairs for 'merges'. It has none"),
        (("model", "merges"), ["a"], "pairs of text without spaces"),
        (("model", "merges"), [["a", "b c"]], "pairs of text without spaces"),
        (("model", "merges"), [["a", 1]], "pairs of text without spaces"),
        (("model", "end_of_word_suffix"), "</w>", "nothing, as in llama.cpp"),
        (("normalizer",), {"type": "Lowercase"}, "none, or NFC"),
        (("added_tokens",), [{"id": 3}], "text for 'content'"),
        (("added_tokens",), [{"id": "3", "content": "a"}], "a number for 'id'"),
        (("added_tokens",), [{"id": 3, "content": "a"}], "the token 'a' twice"),
        (("added_tokens",), [4], "objects for 'added_tokens'"),
        (("post_processor",), _template, "one sequence for 'single'"),
        (
            ("post_processor",),
            _template
            | {
                "single": [
                    {"SpecialToken": {"id": "<tool>"}},
                    {"Sequence": {"id": "A"}},
                ]
            },
            "the bos token, as in llama.cpp",
        ),
    ],
)
def test_tokenizers_that_are_refused(path, value, match, tmp_path):
    folder = folders.write(tmp_path / "a", "Qwen2")
    tree = _at(folders.of_bytes, path, value)
    folders.write_json(folder / "tokenizer.json", tree)
    if match is None:
        written(folder)
        return
    with pytest.raises(ValueError, match=match):
        written(folder)


def test_files_that_are_missing_or_damaged(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")
    arrays = folders.arrays("Llama")
    path = tmp_path / "a.gguf"
    (folder / "tokenizer.model").write_bytes(folders.sentencepiece(kind=1))
    with pytest.raises(ValueError, match="merges pairs .BPE."):
        interop.write_gguf(path, arrays, config=folder)
    (folder / "tokenizer.model").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1])
        with pytest.raises(ValueError, match=f"{name}' is not JSON"):
            interop.write_gguf(path, arrays, config=folder)
        (folder / name).write_bytes(data)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="a' should have a 'config.json'"):
        interop.write_gguf(path, arrays, config=folder)
    with pytest.raises(ValueError, match="a folder with a 'config.json', or a GGUF"):
        interop.write_gguf(path, arrays, config=folder / "model.safetensors")
    interop.write_gguf(path, {})
    with pytest.raises(ValueError, match="have the metadata 'general.architecture'"):
        interop.write_gguf(path, arrays, config=path)
    with pytest.raises(FileNotFoundError):
        interop.write_gguf(path, arrays, config=tmp_path / "nothing.gguf")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma3"])
def test_folders_that_were_changed(kind, tmp_path):
    rng = random.Random(kind)
    folder = folders.write(tmp_path / "a", kind)
    if kind == "Gemma3":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(folders.sentencepiece())
    arrays, path = folders.arrays(kind), tmp_path / "a.gguf"
    names = (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
    )
    files = [folder / name for name in names if (folder / name).exists()]
    written = 0
    for _ in range(250):
        target = rng.choice(files)
        data = target.read_bytes()
        target.write_bytes(mutated(rng, target, data))
        try:
            interop.write_gguf(path, arrays, config=folder)
            written += 1
            interop.open(path).close()
        except (ValueError, UserWarning):
            pass
        target.write_bytes(data)
    assert 0 < written < 250
