import importlib
import pathlib
from typing import Any, TYPE_CHECKING

from ._checkpoint import Checkpoint
from ._containers import read_bytes, short
from ._llama_cpp import splitting, Tables


# The package is optional, so it is only imported when it is needed.
if TYPE_CHECKING:
    from tokenizers import Tokenizer
else:
    Tokenizer = Any


_space = "\u2581"


def tokenizer(checkpoint: Checkpoint, *, pre: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a model, from the tables in its GGUF file, or from the
    `tokenizer.json` next to its files.

    !!! Example

        ```python
        checkpoint = eqquant.interop.open("model.gguf")
        tokenizer = eqquant.interop.tokenizer(checkpoint)
        tokens = tokenizer.encode("Once upon a time").ids
        text = tokenizer.decode(tokens)
        ```

    This needs the package `tokenizers`: `pip install "eqquant[text]"`.

    **Arguments:**

    - `checkpoint`: a checkpoint from [`eqquant.interop.open`][]. It may be closed.
    - `pre`: for tables that merge bytes, llama.cpp's name for the way in which text is
        split into words, such as `"llama-bpe"`. By default, the name in the file.

    **Returns:**

    A `tokenizers.Tokenizer`. Control tokens, such as the one that ends a text, are also
    recognized in text, and left out of decoded text. The token that begins a text is
    added where llama.cpp adds it. Scores of SentencePiece become an order of merges, as
    in transformers. (For equal scores, llama.cpp merges the leftmost pair first.)

    **Raises:**

    An `ImportError` if the package `tokenizers` is missing. A `ValueError` if there are
    neither tables nor a `tokenizer.json`, or if these are damaged or not supported.
    """
    library = _library()
    kind = checkpoint.metadata.get("tokenizer.ggml.model")
    if kind is None:
        return _from_file(library, checkpoint)
    makers = {"gpt2": _of_bytes, "llama": _of_pieces}
    if kind not in makers:
        raise ValueError(
            "'tokenizer.ggml.model' should be 'gpt2', which merges bytes, or 'llama', "
            f"which merges pieces of SentencePiece. Got {short(kind)}."
        )
    tables = Tables(checkpoint.metadata)
    name = checkpoint.metadata.get("tokenizer.ggml.pre") if pre is None else pre
    found = makers[kind](library, tables, name)
    for text, is_control in tables.special():
        # Added one by one, so that each keeps its number in the tables.
        token = library.AddedToken(text, normalized=False, special=is_control)
        (found.add_special_tokens if is_control else found.add_tokens)([token])
    return found


def _library() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as e:
        raise ImportError(
            "A tokenizer takes the package `tokenizers`, which is not installed: "
            '`pip install "eqquant[text]"`.'
        ) from e


def _from_file(library, checkpoint):
    path = pathlib.Path(checkpoint.paths[0]).with_name("tokenizer.json")
    if not path.is_file():
        raise ValueError(
            "There should be a tokenizer: the metadata 'tokenizer.ggml.model', as in "
            f"files of GGUF, or a file {str(path)!r}. Got neither."
        )
    try:
        return library.Tokenizer.from_buffer(read_bytes(path))
    # (The library raises no more specific exception.)
    except Exception as e:
        raise ValueError(f"Could not read {str(path)!r}: {e}") from e


def _of_bytes(library, tables, name):
    how = splitting(name)
    model = library.models.BPE(
        tables.numbers, tables.merges(), ignore_merges=how.ignores_merges
    )
    found = library.Tokenizer(model)
    steps = [_step(library, *step) for step in how.steps]
    found.pre_tokenizer = library.pre_tokenizers.Sequence(steps)
    found.decoder = library.decoders.ByteLevel()
    _add_ends(library, found, tables, how.adds_bos, {})
    return found


def _step(library, kind, how):
    steps = library.pre_tokenizers
    if kind == "Split":
        return steps.Split(library.Regex(how), "isolated")
    if kind == "Digits":
        return steps.Digits(individual_digits=how)
    return steps.ByteLevel(add_prefix_space=False, use_regex=how)


def _of_pieces(library, tables, name):
    unknown, _ = tables.token("unk", 0)
    model = library.models.BPE(
        tables.numbers,
        tables.merges_by_scores(),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    found = library.Tokenizer(model)
    has_prefix = tables.flag("add_space_prefix", True)
    prefix = [library.normalizers.Prepend(_space)] if has_prefix else []
    replace = library.normalizers.Replace(" ", _space)
    found.normalizer = library.normalizers.Sequence([*prefix, replace])
    decoders = library.decoders
    steps = [decoders.Replace(_space, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", left=1)] if has_prefix else []
    found.decoder = decoders.Sequence([*steps, *strip])
    _add_ends(library, found, tables, True, {"bos": 1, "eos": 2})
    return found


def _add_ends(library, found, tables, adds_bos, defaults):
    ends = {
        "bos": tables.flag("add_bos_token", adds_bos),
        "eos": tables.flag("add_eos_token", False),
    }
    special = []
    for kind in filter(ends.get, ends):
        text, number = tables.token(kind, defaults.get(kind))
        # The id is the kind, because the text of a token may be anything.
        special.append({"id": kind, "ids": [number], "tokens": [text]})
    if special:
        parts = [kind for kind in ("bos", "$A", "eos") if ends.get(kind, True)]
        found.post_processor = library.processors.TemplateProcessing(
            single=parts, special_tokens=special
        )
