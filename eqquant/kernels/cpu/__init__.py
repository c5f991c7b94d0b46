"""Kernels for CPUs, in JAX, compiled by XLA. They run where the native library does
not.

`_sweep` multiplies one or two rows, `_float_tiles` and `_integer_tiles` multiply many
rows by tiles of the weight (`_tiles`), and `_rsr` multiplies by RSR's formats.
`_unit_sweep` and `_unit_tiles` do the same for codes of any packing, such as GGUF's,
which `_units` reads; `_trellis` multiplies by trellis codes. `_codes` reads other
stored arrays. `_costs` predicts the times of kernels, including the native ones, from
the measurements in `costs`. `_xla` collects differences between versions of XLA.
"""

from . import (
    _float_tiles as _float_tiles,
    _integer_tiles as _integer_tiles,
    _rsr as _rsr,
    _sweep as _sweep,
    _trellis as _trellis,
    _unit_sweep as _unit_sweep,
    _unit_tiles as _unit_tiles,
)
from ._costs import (
    Cost as Cost,
    describe_processor as describe_processor,
    Kind as Kind,
    kind_of as kind_of,
    measured_machine as measured_machine,
    processor as processor,
)
