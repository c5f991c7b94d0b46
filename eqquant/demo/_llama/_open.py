import equinox as eqx
import jax.random as jr

from ...interop import Checkpoint, load_into
from ._config import Config
from ._model import Llama


# From the names of Hugging Face to those of the model.
names = {"model.layers.{i}.*": "layers.*", "model.*": "*"}


def load_llama(checkpoint: Checkpoint) -> Llama:
    """Loads a model from a file.

    **Arguments:**

    - `checkpoint`: what [`eqquant.interop.open`][] returns, of a GGUF file or a folder
        of Hugging Face.

    **Returns:**

    An [`eqquant.demo.Llama`][]. Arrays that are quantized in the file stay so, packed.

    **Raises:**

    A `ValueError` if it is of another architecture, or if an array is missing.
    """
    config = Config.of(checkpoint)
    skeleton = eqx.filter_eval_shape(Llama, config, key=jr.key(0))
    head = {"lm_head.*": None} if config.is_tied else {}
    return load_into(skeleton, checkpoint, ["llama", names | head])
