"""`eqquant demo`: opens a real language model, quantizes it to several formats, and
compares their sizes, losses and speeds (`_llama`). Without one, it trains a small
model, and compares rounding, calibration and further training. With `--calibrate`, it
compares the losses of rounding, of calibration and of formats within a budget. The
notebooks use the model, the text and the training.

May import `_report`, `interop` and the rooms below them, and rich and matplotlib.
"""

from ._calibrated import run_calibrated as run_calibrated
from ._llama import (
    Config as Config,
    generate as generate,
    Llama as Llama,
    LlamaRow as LlamaRow,
    load_llama as load_llama,
    python_topics as python_topics,
    run_llama as run_llama,
    smollm2 as smollm2,
)
from ._model import attend as attend, LanguageModel as LanguageModel, rotate as rotate
from ._run import run as run
from ._text import standard_library as standard_library, windows as windows
from ._train import loss as loss, train as train
from ._trained import full as full, Recipe as Recipe
