"""`eqquant demo`: trains a small language model, quantizes it to several formats in
several ways, and compares the results. With `--calibrate`, it compares what rounding,
calibration and the choice of formats lose. The notebooks use its model, text and
training.

May import `_report` and the rooms below it, and rich and matplotlib.
"""

from ._calibrated import run_calibrated as run_calibrated
from ._model import attend as attend, LanguageModel as LanguageModel, rotate as rotate
from ._run import run as run
from ._text import standard_library as standard_library, windows as windows
from ._train import loss as loss, train as train
from ._trained import full as full, Recipe as Recipe
