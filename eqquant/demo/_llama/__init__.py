"""The demo with a real language model: Llama, Mistral, Qwen 2 or Qwen 3, from its file.

`_config` and `_model` define the model, `_open` loads it, and `_generate` generates
text. `_comparison` measures it in several formats, and `_run` is the command.
"""

from ._config import Config as Config
from ._file import smollm2 as smollm2
from ._generate import generate as generate
from ._model import Llama as Llama
from ._open import load_llama as load_llama
from ._rows import LlamaRow as LlamaRow
from ._run import run_llama as run_llama
from ._text import python_topics as python_topics
