from ._functions import (
    qdot_general as qdot_general,
    qeinsum as qeinsum,
    qtake as qtake,
)
from ._interpreter import opened as opened
from ._loops import sizes_of_scan as sizes_of_scan
from ._table import register_rule as register_rule
from ._transform import implicit as implicit
