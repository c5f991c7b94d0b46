from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Tokens(NamedTuple):
    """The tokens of the text to calibrate with, and of that which is held out."""

    calibration: Int[np.ndarray, " t"]
    held_out: Int[np.ndarray, " u"]


def python_topics(tokenizer) -> Tokens:
    """What Python's `help()` tells of the language, which every Python has
    (`pydoc_data.topics`).

    **Arguments:**

    - `tokenizer`: what [`eqquant.interop.tokenizer`][] returns.

    **Returns:**

    The tokens `calibration`, of the first half of the topics, and `held_out`, of the
    second half.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    texts = ["\n\n".join(topics[name] for name in half) for half in halves]
    return Tokens(*(np.array(tokenizer.encode(text).ids, np.int32) for text in texts))
