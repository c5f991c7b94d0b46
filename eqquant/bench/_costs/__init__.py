"""The times of the CPU kernels on this machine, for developers of kernels:
`python -m eqquant.bench`.

`_costs` measures the times by which `eqquant.kernels` chooses among kernels, and
`_choices` how good the choices are.
"""

from ._choices import (
    measure_choices as measure_choices,
    print_choices as print_choices,
)
from ._costs import on_one_core as on_one_core, write_costs as write_costs
