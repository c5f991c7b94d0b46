"""Logits and tokens, to compare: `python run.py llama_cpp FILE.gguf BLOCK TEXTS OUT`
of llama.cpp, and `python run.py transformers FOLDER BLOCK TEXTS OUT` of transformers,
with the inputs of products rounded to 8 bits in blocks of so many numbers, if not 0.
TEXTS is a list in JSON, and OUT a file for `numpy.load`: `logits`, `tokens.0`, ..."""

import json
import pathlib
import sys

import numpy as np


def llama_cpp(path, block, texts):
    import llama_cpp

    # Keys and values in float32, too.
    model = llama_cpp.Llama(
        path,
        logits_all=True,
        n_ctx=512,
        n_batch=512,
        n_ubatch=512,
        n_threads=2,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        swa_full=True,
        verbose=False,
    )
    found = {}
    for i, text in enumerate(texts):
        tokens = model.tokenize(text.encode(), add_bos=True, special=True)
        found[f"tokens.{i}"] = tokens
    numbers = probe(len(texts), model.n_vocab())
    model.eval(numbers)
    return found | {"logits": model.scores[: len(numbers)]}


def transformers(folder, block, texts):
    import tokenizers
    import torch
    import transformers

    folder = pathlib.Path(folder)
    found = {}
    if (folder / "tokenizer.json").exists():
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        encode = lambda text: tokenizer.encode(text).ids
    else:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
        encode = lambda text: [model.bos_id(), *model.encode(text)]
    for i, text in enumerate(texts):
        found[f"tokens.{i}"] = encode(text)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    for layer in model.modules():
        if block > 0 and isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda layer, x: (rounded(x[0], block),))
    numbers = probe(len(texts), model.config.vocab_size)
    with torch.inference_mode():
        logits = model(torch.tensor([numbers])).logits[0].numpy()
    return found | {"logits": logits}


def rounded(x, block):
    """Numbers rounded as llama.cpp does it before it multiplies quantized weights."""
    blocks = x.unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    stored = scale.half().float() if block == 32 else scale
    return ((blocks / scale.clamp(min=1e-30)).round() * stored).flatten(-2)


def probe(seed, size):
    """Tokens to compute the logits of."""
    return np.random.default_rng(seed).integers(0, size - 5, 60).tolist()


if __name__ == "__main__":
    kind, path, block, texts, out = sys.argv[1:]
    run = {"llama_cpp": llama_cpp, "transformers": transformers}[kind]
    np.savez(out, **run(path, int(block), json.loads(texts)))
