from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Tokens(NamedTuple):
    """The tokens of the calibration text, and of the held-out text."""

    calibration: Int[np.ndarray, " t"]
    held_out: Int[np.ndarray, " u"]


def python_topics(tokenizer) -> Tokens:
    """Returns the tokens of the topics of Python's `help()`, which every Python has
    (`pydoc_data.topics`).

    **Arguments:**

    - `tokenizer`: a tokenizer from [`eqquant.interop.tokenizer`][].

    **Returns:**

    The tokens of the first half of the topics as `calibration`, and of the second half
    as `held_out`.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    texts = ["\n\n".join(topics[name] for name in half) for half in halves]
    return Tokens(*(np.array(tokenizer.encode(text).ids, np.int32) for text in texts))
