from ._convert import convert as convert
from ._outcome import Outcome as Outcome
