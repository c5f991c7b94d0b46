import collections
import re

import equinox as eqx
import jax.random as jr

from ...interop import Checkpoint, load_into
from ._config import Config
from ._layers import listed
from ._model import Llama


def load_llama(checkpoint: Checkpoint) -> Llama:
    """Loads a model from a file.

    **Arguments:**

    - `checkpoint`: what [`eqquant.interop.open`][] returns, of a GGUF file or a folder
        of Hugging Face.

    **Returns:**

    An [`eqquant.demo.Llama`][]. Arrays that are quantized in the file stay so, packed.
    Its layers are a stack, which is scanned; or if their arrays are of other formats
    each, as in llama.cpp's `Q4_K_M`, a list of layers, which takes longer to compile.

    **Raises:**

    A `ValueError` if it is of another architecture, or if an array is missing.
    """
    config = Config.of(checkpoint)
    model = eqx.filter_eval_shape(Llama, config, key=jr.key(0))
    layers = "layers.*"
    if _is_mixed(checkpoint):
        where = lambda model: model.layers
        model = eqx.tree_at(where, model, listed(model.layers, config.depth))
        layers = "layers.{i}.*"
    # From the names of Hugging Face to those of the model.
    names = {"model.layers.{i}.*": layers, "model.*": "*"}
    head = {"lm_head.*": None} if config.is_tied else {}
    return load_into(model, checkpoint, ["llama", names | head])


def _is_mixed(checkpoint):
    """Whether an array has another format in some layers than in others."""
    formats = collections.defaultdict(set)
    for name, entry in checkpoint.entries.items():
        formats[re.sub(r"\.\d+\.", ".*.", name, count=1)].add(entry.format)
    return any(len(found) > 1 for found in formats.values())
