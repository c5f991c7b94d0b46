from typing import Any, NamedTuple

from .._containers import short
from ._values import Values


_words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_rest_of_tekken = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_start = r"[^\r\n\p{L}\p{N}]?"
_upper, _lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_llama3 = rf"{_words}|{_start}\p{{L}}+|\p{{N}}{{1,3}}|{_rest}"
_qwen2 = rf"{_words}|{_start}\p{{L}}+|\p{{N}}|{_rest}"
_tekken = (
    rf"{_start}{_upper}*{_lower}+|{_start}{_upper}+{_lower}*|\p{{N}}|{_rest_of_tekken}"
)
_gpt4o = (
    rf"{_start}{_upper}*{_lower}+{_words}?|{_start}{_upper}+{_lower}*{_words}?"
    rf"|\p{{N}}{{1,3}}|{_rest_of_tekken}"
)

# Maps the steps that split text, and whether whole words are looked up before pairs are
# merged, to llama.cpp's name for them.
_names: dict[tuple[tuple[Any, ...], bool], str] = {
    ((("Split", _llama3), ("ByteLevel", False)), True): "llama-bpe",
    ((("Split", _llama3), ("ByteLevel", False)), False): "dbrx",
    ((("Split", _qwen2), ("ByteLevel", False)), False): "qwen2",
    ((("Split", _tekken), ("ByteLevel", False)), True): "tekken",
    ((("Split", _gpt4o), ("ByteLevel", False)), False): "gpt-4o",
    ((("ByteLevel", True),), False): "gpt-2",
    ((("Digits", True), ("ByteLevel", True)), False): "smollm",
}
# Other names that llama.cpp has for the same steps.
_same = {
    "dbrx": ("smaug-bpe",),
    "gpt-2": ("phi-2", "olmo", "jais", "mpt", "exaone4", "a.x-4.0", "mellum"),
    "gpt-4o": ("llama4",),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
    "qwen2": ("deepseek-r1-qwen", "stablelm2", "megrez", "kormo"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone"),
}
# The names that add the token at the beginning of a text by default.
_with_bos = ("llama-bpe", "tekken")


class Splitting(NamedTuple):
    """The way in which text is split into words, before their bytes are merged.

    - `steps`: pairs of `"Split"` and a pattern, of `"Digits"` and whether each digit is
      split off, or of `"ByteLevel"` and whether it splits like GPT-2.
    - `ignores_merges`: whether words that are tokens are looked up as a whole.
    - `adds_bos`: whether the token at the beginning of a text is added by default.
    """

    steps: tuple[tuple[str, Any], ...]
    ignores_merges: bool
    adds_bos: bool


def splitting(name: Any) -> Splitting:
    """Returns the splitting for a name in `"tokenizer.ggml.pre"`. Raises a `ValueError`
    if the name is not known."""
    for (steps, ignores), usual in _names.items():
        if name == usual or name in _same.get(usual, ()):
            return Splitting(steps, ignores, usual in _with_bos)
    known = [
        other for usual in _names.values() for other in (usual, *_same.get(usual, ()))
    ]
    raise ValueError(
        "'tokenizer.ggml.pre' of a tokenizer of bytes, or the argument `pre`, should "
        f"name a way to split text that is known here: one of {', '.join(known)}. Got "
        f"{short(name)}."
    )


def pre_tokenizer(tokenizer: Values) -> str:
    """Returns llama.cpp's name for the way in which a `tokenizer.json` of bytes splits
    text into words. Raises a `ValueError` if this way is not known."""
    whole = tokenizer.below("pre_tokenizer")
    is_sequence = whole.get("type") == "Sequence"
    steps = whole.objects("pretokenizers") if is_sequence else [whole]
    ignores = tokenizer.below("model").flag("ignore_merges", False)
    key = tuple(_step(step) for step in steps), ignores
    if key not in _names:
        raise ValueError(
            f"{whole.where} splits text in a way that is none of "
            f"{', '.join(_names.values())}: {short(key)}. If llama.cpp has a name for "
            "it, pass it as the metadata 'tokenizer.ggml.pre'."
        )
    return _names[key]


def _step(step):
    kind = step.get("type")
    if kind == "Split" and not step.flag("invert", False):
        pattern = step.below("pattern").get("Regex")
        if step.get("behavior") == "Isolated" and isinstance(pattern, str):
            return kind, pattern
    if kind == "ByteLevel" and not step.flag("add_prefix_space", True):
        return kind, step.flag("use_regex", True)
    if kind == "Digits":
        return kind, step.flag("individual_digits", False)
    return repr(kind), None
