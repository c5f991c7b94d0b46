"""`eqquant demo`: trains a small language model, quantizes it to each format, and
compares the results.
"""

from ._model import attend as attend, rotate as rotate
from ._run import run as run
