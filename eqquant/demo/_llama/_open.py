import collections
import re

import equinox as eqx
import jax.random as jr

from ...interop import Checkpoint, load_into
from ._config import Config
from ._model import listed, Llama


def load_llama(checkpoint: Checkpoint) -> Llama:
    """Loads a model from a file.

    **Arguments:**

    - `checkpoint`: a GGUF file or a Hugging Face folder, opened by
        [`eqquant.interop.open`][].

    **Returns:**

    An [`eqquant.demo.Llama`][]. Quantized arrays stay packed. Its layers are a stack,
    which is scanned. If their formats differ, as in llama.cpp's `Q4_K_M`, they are a
    list, which takes longer to compile.

    **Raises:**

    A `ValueError` if its architecture is not supported, or if an array is missing.
    """
    config = Config.of(checkpoint)
    model = eqx.filter_eval_shape(Llama, config, key=jr.key(0))
    layers = "layers.*"
    if _is_mixed(checkpoint):
        where = lambda model: model.layers
        model = eqx.tree_at(where, model, listed(model.layers, config.depth))
        layers = "layers.{i}.*"
    # Maps Hugging Face's names to the names of the model.
    names = {"model.layers.{i}.*": layers, "model.*": "*"}
    head = {"lm_head.*": None} if config.is_tied else {}
    return load_into(model, checkpoint, ["llama", names | head])


def _is_mixed(checkpoint):
    """Whether the formats of an array differ between layers."""
    formats = collections.defaultdict(set)
    for name, entry in checkpoint.entries.items():
        formats[re.sub(r"\.\d+\.", ".*.", name, count=1)].add(entry.format)
    return any(len(found) > 1 for found in formats.values())
