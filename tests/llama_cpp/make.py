"""Makes small models of random weights and their tokenizers, as folders of Hugging
Face: `python make.py KIND FOLDER`. It needs torch, transformers, tokenizers and
sentencepiece, and none of this package."""

import io
import json
import pathlib
import sys

import sentencepiece
import tokenizers
import torch
import transformers


_sizes = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 64,
}
_llama3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_yarn = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_theta = lambda theta: {"rope_type": "default", "rope_theta": theta}
_gemma = {"tie_word_embeddings": True, "query_pre_attn_scalar": 64}
_few = {"num_key_value_heads": 4, "rope_parameters": _theta(50000.0)}
_wide_heads = {"head_dim": 128, "query_pre_attn_scalar": 128}

# The class of a configuration, its values, and the tokenizer.
_kinds = {
    "llama2": ("Llama", _few, "pieces"),
    "llama3": ("Llama", {"rope_parameters": _llama3}, "llama3"),
    "llama-linear": ("Llama", {"rope_parameters": _linear}, "model"),
    "llama-yarn": ("Llama", {"rope_parameters": _yarn}, "gpt2"),
    "llama-biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "smollm",
    ),
    "mistral": (
        "Mistral",
        {"sliding_window": 64, "head_dim": 32, "num_attention_heads": 8},
        "pieces",
    ),
    "nemo": ("Mistral", {"sliding_window": None, "head_dim": 128}, "tekken"),
    "qwen2": ("Qwen2", {"rope_parameters": _theta(1e6)}, "qwen2"),
    "qwen2-yarn": (
        "Qwen2",
        {"rope_parameters": _yarn | {"attention_factor": 1.3}},
        "qwen2",
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 128}, "qwen2"),
    "gemma": ("Gemma", _gemma | {"head_dim": 128}, "gemma"),
    "gemma2": ("Gemma2", _gemma | _wide_heads | {"sliding_window": 16}, "gemma"),
    "gemma3": (
        "Gemma3Text",
        _gemma
        | {
            "sliding_window": 16,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": _linear | {"rope_theta": 1e6},
                "sliding_attention": _theta(1e4),
            },
        },
        "gemma",
    ),
    "gemma3-pattern": (
        "Gemma3Text",
        _gemma
        | {
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "gemma",
    ),
}


def texts() -> list[str]:
    """Lines to learn tokenizers from."""
    folder = pathlib.Path(json.__file__).parent
    files = sorted(folder.glob("*.py")) + [pathlib.Path(__file__)]
    extra = ["Größe, naïve café", "日本語のテキスト", "Привет, мир", "🚀 🦙"] * 3
    return [line for f in files for line in f.read_text().splitlines()] + extra


def make(kind: str, folder: pathlib.Path) -> None:
    name, values, tokenizer = _kinds[kind]
    folder.mkdir(parents=True)
    number = _tokenizers[tokenizer](folder)
    config_class = getattr(transformers, f"{name}Config")
    # Some embeddings have no token.
    config = config_class(**(_sizes | values), vocab_size=number + 5, **_ids)
    torch.manual_seed(0)
    name = name.removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for path, x in model.named_parameters():
        size = 0.3 if x.ndim == 1 else x.shape[-1] ** -0.5
        x.data += size * torch.randn_like(x) if "embed" not in path else 0
    model.save_pretrained(folder)


_ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_specials = ["<unk>", "<s>", "</s>", "<|user|>"]
_own = ["<think>", "\u2581\u2581\u2581\u2581"]
_words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_upper, _lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_start = r"[^\r\n\p{L}\p{N}]?"
_splits = {
    "llama3": rf"{_words}|{_start}\p{{L}}+|\p{{N}}{{1,3}}|{_rest}",
    "qwen2": rf"{_words}|{_start}\p{{L}}+|\p{{N}}|{_rest}",
    "tekken": (
        rf"{_start}{_upper}*{_lower}+|{_start}{_upper}+{_lower}*|\p{{N}}|"
        + _rest.replace(r"[\r\n]*", r"[\r\n/]*")
    ),
}


def _bytes(kind):
    def make(folder):
        pre, split = tokenizers.pre_tokenizers, _splits.get(kind)
        ignores = kind in ("llama3", "tekken")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignores))
        steps = [pre.ByteLevel(add_prefix_space=False, use_regex=split is None)]
        if split is not None:
            steps.insert(0, pre.Split(tokenizers.Regex(split), "isolated"))
        if kind == "smollm":
            steps.insert(0, pre.Digits(individual_digits=True))
        whole = steps[0] if len(steps) == 1 else pre.Sequence(steps)
        tokenizer.pre_tokenizer = whole
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        if kind == "qwen2":
            tokenizer.normalizer = tokenizers.normalizers.NFC()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=_specials,
            initial_alphabet=pre.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(texts(), trainer)
        tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
        if kind in ("llama3", "tekken"):
            tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
            )
        return _save(tokenizer, folder)

    return make


def _save(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "unk_token": "<unk>",
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def _sentencepiece(folder, prefix):
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts()),
        model_writer=file,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        allow_whitespace_only_pieces=True,
        control_symbols=["<|user|>"],
        # (After these, llama.cpp adds a space, if it does so at the beginning.)
        user_defined_symbols=[] if prefix else _own,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    return file.getvalue()


def _model(folder):
    data = _sentencepiece(folder, True)
    (folder / "tokenizer.model").write_bytes(data)
    return sentencepiece.SentencePieceProcessor(model_proto=data).vocab_size()


def _pieces(prefix):
    def make(folder):
        data = _sentencepiece(folder, prefix)
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
        number = model.vocab_size()
        vocab = {model.id_to_piece(i): i for i in range(number)}
        scores = {piece: model.get_score(i) for piece, i in vocab.items()}
        merges = [
            (piece[:i], piece[i:])
            for piece, number in vocab.items()
            if model.get_score(number) < 0 or len(piece) > 1
            for i in range(1, len(piece))
            if piece[:i] in vocab and piece[i:] in vocab
        ]
        merges.sort(key=lambda pair: -scores["".join(pair)])
        tokenizer = tokenizers.Tokenizer(
            tokenizers.models.BPE(
                vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
            )
        )
        replace = tokenizers.normalizers.Replace(" ", "\u2581")
        steps = [tokenizers.normalizers.Prepend("\u2581"), replace]
        tokenizer.normalizer = (
            tokenizers.normalizers.Sequence(steps) if prefix else replace
        )
        tokenizer.add_special_tokens(_specials)
        own = _own[:1] if prefix else _own
        tokenizer.add_tokens(
            [tokenizers.AddedToken(x, normalized=x != _own[0]) for x in own]
        )
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
        return _save(tokenizer, folder)

    return make


_tokenizers = {
    **{kind: _bytes(kind) for kind in ("llama3", "qwen2", "gpt2", "smollm", "tekken")},
    "model": _model,
    "pieces": _pieces(True),
    "gemma": _pieces(False),
}


if __name__ == "__main__":
    kinds = list(_kinds) if sys.argv[1] == "all" else [sys.argv[1]]
    for kind in kinds:
        make(kind, pathlib.Path(sys.argv[2]) / kind)
