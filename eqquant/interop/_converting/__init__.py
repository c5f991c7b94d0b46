from ._convert import convert as convert
from ._plan import Outcome as Outcome
